// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// write puts a certificate and its key where a Secret has them.
func write(t *testing.T, dir string, now time.Time) *x509.Certificate {
	t.Helper()
	c, err := own(now)
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.MarshalPKCS8PrivateKey(c.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, block := range map[string]*pem.Block{
		"tls.crt": {Type: "CERTIFICATE", Bytes: c.Certificate[0]}, "tls.key": {Type: "PRIVATE KEY", Bytes: key},
	} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	leaf, err := x509.ParseCertificate(c.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	return leaf
}

func serial(t *testing.T, c *certificate) string {
	t.Helper()
	got, err := c.get(nil)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(got.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	if now := c.now(); now.Before(leaf.NotBefore) || now.After(leaf.NotAfter) {
		t.Errorf("at %v a certificate from %v to %v", now, leaf.NotBefore, leaf.NotAfter)
	}
	return leaf.SerialNumber.String()
}

// TestTLS_own: a process that runs for years always has a good certificate.
func TestTLS_own(t *testing.T) {
	now := time.Date(2026, 11, 22, 8, 0, 0, 0, time.UTC)
	c := &certificate{now: func() time.Time { return now }}
	seen := map[string]bool{}
	for range 3 * 365 {
		seen[serial(t, c)] = true
		now = now.Add(24 * time.Hour)
	}
	if len(seen) < 3*365/60-1 || len(seen) > 3*365/60+2 {
		t.Errorf("%d certificates in three years", len(seen))
	}
}

// TestTLS_replaced: a certificate that is replaced is served soon, and one that is
// half there not at all.
func TestTLS_replaced(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	if _, err := TLS(dir); err == nil || !strings.Contains(err.Error(), "want a Secret of the type kubernetes.io/tls at "+dir) {
		t.Errorf("an empty directory: %v", err)
	}
	first := write(t, dir, now)
	c := &certificate{dir: dir, now: func() time.Time { return now }}
	if got := serial(t, c); got != first.SerialNumber.String() {
		t.Errorf("certificate %s, want %s", got, first.SerialNumber)
	}
	second := write(t, dir, now)
	now = now.Add(reloadEvery)
	if got := serial(t, c); got != second.SerialNumber.String() {
		t.Errorf("certificate %s, want the new one, %s", got, second.SerialNumber)
	}
	if err := os.Remove(filepath.Join(dir, "tls.key")); err != nil {
		t.Fatal(err)
	}
	now = now.Add(reloadEvery)
	if got := serial(t, c); got != second.SerialNumber.String() {
		t.Errorf("certificate %s while the key is missing, want the old one, %s", got, second.SerialNumber)
	}
}

// TestListener: it speaks TLS only, and holds so many connections at a time.
func TestListener(t *testing.T) {
	dir := t.TempDir()
	leaf := write(t, dir, time.Now())
	config, err := TLS(dir)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "metrics") }),
		ReadHeaderTimeout: time.Second, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
	}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(Listener(ln, config)) }()
	defer func() {
		srv.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	}()
	roots := x509.NewCertPool()
	roots.AddCert(leaf)
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "kube-smcr"}}}
	defer client.CloseIdleConnections()
	get := func() (string, error) {
		resp, err := client.Get("https://" + ln.Addr().String())
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return string(b), err
	}
	if got, err := get(); err != nil || got != "metrics" {
		t.Errorf("got %q, %v", got, err)
	}
	if resp, err := http.Get("http://" + ln.Addr().String()); err == nil {
		resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			t.Error("it answers without TLS")
		}
	}
	client.CloseIdleConnections()
	// Who connects and is silent holds a place for no longer than a header may take.
	for range 2 * maxConns {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	if got, err := get(); err != nil || got != "metrics" {
		t.Errorf("beside silent connections: got %q, %v", got, err)
	}
}

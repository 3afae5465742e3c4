// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"bytes"
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
	c := &certificate{log: slog.New(slog.DiscardHandler), now: func() time.Time { return now }}
	seen := map[string]bool{}
	for range 3 * 365 {
		seen[serial(t, c)] = true
		now = now.Add(24 * time.Hour)
	}
	if len(seen) < 3*365/60-1 || len(seen) > 3*365/60+2 {
		t.Errorf("%d certificates in three years", len(seen))
	}
}

// TestTLS_replaced: a new certificate is served soon after it replaced the old one. While only one of
// the two files is new, the old certificate is served.
func TestTLS_replaced(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	first := write(t, dir, now)
	c := &certificate{dir: dir, log: slog.New(slog.DiscardHandler), now: func() time.Time { return now }}
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

// TestTLS_mended: the program starts although the Secret cannot be used. It logs once what is wrong with
// which file and what to do, and uses the Secret when it is mended.
func TestTLS_mended(t *testing.T) {
	put := func(name, text string) func(*testing.T, string, time.Time) {
		return func(t *testing.T, dir string, now time.Time) {
			write(t, dir, now)
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, tt := range []struct {
		name    string
		prepare func(t *testing.T, dir string, now time.Time)
		want    string
	}{
		{"nothing there", func(*testing.T, string, time.Time) {}, "/tls.crt is not there"},
		{"no key", func(t *testing.T, dir string, now time.Time) {
			write(t, dir, now)
			if err := os.Remove(filepath.Join(dir, "tls.key")); err != nil {
				t.Fatal(err)
			}
		}, "/tls.key is not there"},
		{"an empty key", put("tls.key", "\n"), "/tls.key is empty"},
		{"twice base64", put("tls.crt", "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCg=="), "/tls.crt is not PEM"},
		{"another one's key", func(t *testing.T, dir string, now time.Time) {
			other := t.TempDir()
			write(t, other, now)
			key, err := os.ReadFile(filepath.Join(other, "tls.key"))
			if err != nil {
				t.Fatal(err)
			}
			put("tls.key", string(key))(t, dir, now)
		}, "do not go together"},
		{"at its end", func(t *testing.T, dir string, now time.Time) { write(t, dir, now.Add(-ownCertFor-time.Hour)) }, "/tls.crt ended at "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, now := t.TempDir(), time.Now()
			tt.prepare(t, dir, now)
			var said bytes.Buffer
			log := slog.New(slog.NewTextHandler(&said, nil))
			config, err := TLS(dir, log)
			if err != nil {
				t.Fatalf("it ends: %v", err)
			}
			for range 3 {
				if _, err := config.GetCertificate(nil); err == nil {
					t.Error("there is a certificate")
				}
			}
			if n := strings.Count(said.String(), "level=ERROR"); n != 1 {
				t.Errorf("%d lines, want 1:\n%s", n, &said)
			}
			for _, want := range []string{dir, tt.want, "mend the Secret that metrics.tlsSecret of the chart names", "no metrics until it is mended"} {
				if !strings.Contains(said.String(), want) {
					t.Errorf("it does not say %q:\n%s", want, &said)
				}
			}
			c := &certificate{dir: dir, log: log, now: func() time.Time { return now }}
			if _, err := c.get(nil); err == nil {
				t.Error("there is a certificate")
			}
			mended := write(t, dir, now)
			now = now.Add(reloadEvery)
			if got := serial(t, c); got != mended.SerialNumber.String() {
				t.Errorf("certificate %s, want the mended one, %s", got, mended.SerialNumber)
			}
			if !strings.Contains(said.String(), "can be used again") {
				t.Errorf("it does not say that all is well:\n%s", &said)
			}
		})
	}
}

// TestListener: the listener speaks TLS only, and has a limit of connections at a time.
func TestListener(t *testing.T) {
	dir := t.TempDir()
	leaf := write(t, dir, time.Now())
	config, err := TLS(dir, slog.New(slog.DiscardHandler))
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
	// A client that connects and sends nothing has its place for no longer than a header may take.
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

// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/net/netutil"
)

// Listener returns a listener with TLS, if config is given, and with at most so
// many connections as scrapes need.
func Listener(ln net.Listener, config *tls.Config) net.Listener {
	ln = netutil.LimitListener(ln, maxConns)
	if config != nil {
		ln = tls.NewListener(ln, config)
	}
	return ln
}

// TLS returns how to serve with the certificate tls.crt and the key tls.key of a
// directory, as they are in a Secret, also after they are replaced. Without a
// directory it is a certificate that is made now, and kept nowhere.
func TLS(dir string) (*tls.Config, error) {
	c := &certificate{dir: dir, now: time.Now}
	if _, err := c.get(nil); err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: c.get, NextProtos: []string{"http/1.1"}}, nil
}

// certificate is the one that is served.
type certificate struct {
	dir string
	now func() time.Time

	mu    sync.Mutex // guards what is below
	cert  *tls.Certificate
	until time.Time // look again then
}

func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	if c.cert != nil && now.Before(c.until) {
		return c.cert, nil
	}
	cert, until, err := c.next(now)
	switch {
	case err == nil:
		c.cert, c.until = cert, until
	case c.cert == nil:
		return nil, err
	default: // half of it was replaced: the old one will do
		c.until = now.Add(reloadEvery)
	}
	return c.cert, nil
}

func (c *certificate) next(now time.Time) (*tls.Certificate, time.Time, error) {
	if c.dir == "" {
		cert, err := own(now)
		return cert, now.Add(ownCertFor - ownCertSpare), err
	}
	cert, err := tls.LoadX509KeyPair(filepath.Join(c.dir, "tls.crt"), filepath.Join(c.dir, "tls.key"))
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("certificate of the metrics: %w: want a Secret of the type kubernetes.io/tls at %s", err, c.dir)
	}
	return &cert, now.Add(reloadEvery), nil
}

// own makes a certificate that nobody signed.
func own(now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	text := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "kube-smcr"}, DNSNames: []string{"kube-smcr"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(ownCertFor), // clocks differ
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, text, text, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

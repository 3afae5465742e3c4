// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// TLS returns the configuration of a server with the certificate tls.crt and the key
// tls.key of a directory, the names that they have in a Secret. It notices when they are
// replaced. While there is no usable certificate, no client is served, and the log says
// what to do. If dir is "", TLS makes a certificate, which is not stored.
func TLS(dir string, log *slog.Logger) (*tls.Config, error) {
	c := &certificate{dir: dir, log: log, now: time.Now}
	if _, err := c.get(nil); err != nil && dir == "" {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: c.get, NextProtos: []string{"http/1.1"}}, nil
}

// certificate is the certificate of a server.
type certificate struct {
	dir string
	log *slog.Logger
	now func() time.Time

	mu    sync.Mutex // guards what is below
	cert  *tls.Certificate
	err   error     // the error of the last look at the files
	until time.Time // when to look at the files again
}

// get returns the certificate to serve with. If the files were replaced by ones that cannot
// be used, it goes on with the old certificate.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := c.now(); !now.Before(c.until) {
		cert, until, err := c.next(now)
		c.say(err)
		c.err, c.until = err, until
		if err == nil {
			c.cert = cert
		}
	}
	if c.cert == nil {
		return nil, c.err
	}
	return c.cert, nil
}

// say logs what is wrong with the certificate, if that changed.
func (c *certificate) say(err error) {
	switch was := c.err; {
	case err == nil && was != nil:
		c.log.Info("the certificate of the metrics can be used again", "dir", c.dir)
	case err != nil && (was == nil || was.Error() != err.Error()):
		instead := "no metrics until it is mended"
		if c.cert != nil {
			instead = "the one from before is served"
		}
		c.log.Error("the certificate of the metrics cannot be used", "instead", instead, "err", err)
	}
}

func (c *certificate) next(now time.Time) (_ *tls.Certificate, until time.Time, err error) {
	if c.dir == "" {
		cert, err := own(now)
		return cert, now.Add(ownCertFor - ownCertSpare), err
	}
	cert, err := load(c.dir, now)
	if err != nil {
		err = fmt.Errorf("certificate of the metrics: %w: mend the Secret that metrics.tlsSecret of the chart names,"+
			" which is of the type kubernetes.io/tls; it is read again by itself", err)
	}
	return cert, now.Add(reloadEvery), err
}

// load reads the certificate and key of a Secret. The error names the file that is wrong.
func load(dir string, now time.Time) (*tls.Certificate, error) {
	crt, key := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	var text [2][]byte
	for i, file := range []string{crt, key} {
		b, err := os.ReadFile(file)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("%s is not there", file)
		case err != nil:
			return nil, err
		case len(bytes.TrimSpace(b)) == 0:
			return nil, fmt.Errorf("%s is empty", file)
		}
		if block, _ := pem.Decode(b); block == nil {
			return nil, fmt.Errorf("%s is not PEM: want -----BEGIN at the beginning of a line", file)
		}
		text[i] = b
	}
	cert, err := tls.X509KeyPair(text[0], text[1])
	if err != nil {
		return nil, fmt.Errorf("%s and %s do not go together: %w", crt, key, err)
	}
	if leaf := cert.Leaf; now.After(leaf.NotAfter) {
		return nil, fmt.Errorf("%s ended at %s", crt, leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return &cert, nil
}

// own makes a self-signed certificate.
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

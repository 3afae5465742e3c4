// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// A authority signs the certificates of one cluster.
type authority struct {
	dir    string // where the files are, for the host
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
	pem    []byte
	serial int64
}

// A subject is one certificate.
type subject struct {
	file   string
	name   string   // common name: the user, or the server
	groups []string // organizations: the user's groups
	hosts  []string // names and addresses that it serves
}

// newAuthority makes an authority, its certificate and the key that signs
// service accounts' tokens, in dir.
func newAuthority(dir string) (*authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	a := &authority{dir: dir}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the authority's key: %w", err)
	}
	a.key = key
	template := a.template(pkix.Name{CommonName: "kube-smcr-cluster"})
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage |= x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make the authority's certificate: %w", err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, fmt.Errorf("make the authority's certificate: %w", err)
	}
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := a.write("ca.crt", a.pem); err != nil {
		return nil, err
	}
	return a, a.tokenKey()
}

// tokenKey makes sa.key and sa.pub.
func (a *authority) tokenKey() error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make the key of tokens: %w", err)
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return fmt.Errorf("make the key of tokens: %w", err)
	}
	private, err := encodeKey(key)
	if err != nil {
		return err
	}
	if err := a.write("sa.key", private); err != nil {
		return err
	}
	return a.write("sa.pub", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}))
}

func (a *authority) template(name pkix.Name) *x509.Certificate {
	a.serial++
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: big.NewInt(a.serial),
		Subject:      name,
		NotBefore:    now.Add(-certificateAge),
		NotAfter:     now.Add(certificateLife),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
}

// issue writes FILE.crt and FILE.key.
func (a *authority) issue(s subject) (certificate, private []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make the key of %s: %w", s.file, err)
	}
	template := a.template(pkix.Name{CommonName: s.name, Organization: s.groups})
	for _, h := range s.hosts {
		if ip := net.ParseIP(h); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, h)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, nil, fmt.Errorf("make the certificate of %s: %w", s.file, err)
	}
	certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if private, err = encodeKey(key); err != nil {
		return nil, nil, err
	}
	if err := a.write(s.file+".crt", certificate); err != nil {
		return nil, nil, err
	}
	return certificate, private, a.write(s.file+".key", private)
}

// kubeconfig issues a certificate and returns a kubeconfig with it.
func (a *authority) kubeconfig(server string, s subject) ([]byte, error) {
	certificate, private, err := a.issue(s)
	if err != nil {
		return nil, err
	}
	enc := base64.StdEncoding.EncodeToString
	return []byte(strings.Join([]string{
		"apiVersion: v1",
		"kind: Config",
		"current-context: kube-smcr",
		"clusters:",
		"- name: kube-smcr",
		"  cluster:",
		"    server: " + server,
		"    certificate-authority-data: " + enc(a.pem),
		"users:",
		"- name: " + s.file,
		"  user:",
		"    client-certificate-data: " + enc(certificate),
		"    client-key-data: " + enc(private),
		"contexts:",
		"- name: kube-smcr",
		"  context: {cluster: kube-smcr, user: " + s.file + "}",
		"",
	}, "\n")), nil
}

func (a *authority) write(name string, text []byte) error {
	if err := os.WriteFile(filepath.Join(a.dir, name), text, 0o600); err != nil {
		return fmt.Errorf("write certificate: %w", err)
	}
	return nil
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

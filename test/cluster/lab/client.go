// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
)

// A client asks the API server for the few things that the supervisor must
// know; it spares the cluster's library the Kubernetes client.
type client struct{ http http.Client }

type dialFunc = func(ctx context.Context, network, address string) (net.Conn, error)

func newClient(ca *authority, dial dialFunc) (*client, error) {
	certificate, key, err := ca.issue(subject{file: "supervisor", name: "supervisor", groups: []string{"system:masters"}})
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, fmt.Errorf("use the supervisor's certificate: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	return &client{http: http.Client{Timeout: requestTimeout, Transport: &http.Transport{
		DialContext:       dial,
		DisableKeepAlives: true, // the API server may be another one the next time
		TLSClientConfig:   &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots, MinVersion: tls.VersionTLS12},
	}}}, nil
}

// get reads an object into out, unless that is nil.
func (c *client) get(ctx context.Context, path string, out any) error {
	return c.do(ctx, http.MethodGet, path, nil, out)
}

func (c *client) post(ctx context.Context, path string, object any) error {
	text, err := json.Marshal(object)
	if err != nil {
		return err
	}
	return c.do(ctx, http.MethodPost, path, bytes.NewReader(text), nil)
}

func (c *client) do(ctx context.Context, method, path string, body io.Reader, out any) error {
	r, err := http.NewRequestWithContext(ctx, method, "https://127.0.0.1"+path, body)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	r.Header.Set("Content-Type", "application/json")
	answer, err := c.http.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxResponse))
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	if answer.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s: %s: %s", method, path, answer.Status, text)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(text, out); err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

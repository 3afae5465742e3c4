// SPDX-License-Identifier: Apache-2.0

package agentapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"syscall"
	"time"
)

const (
	// maxAnswer bounds what a client reads: 64 Ki connections of about 700
	// bytes each.
	maxAnswer = 64 << 20
	// answerTimeout bounds how long a client waits for an answer.
	answerTimeout = 10 * time.Second
	// DefaultSocket is where the agent listens unless configured otherwise.
	DefaultSocket = "/run/kube-smcr/agent.sock"
)

// ErrNotRunning means that no agent answers on the socket.
var ErrNotRunning = errors.New("the node agent is not running")

// RefusedError is the agent's answer that it refuses a request, with the reason.
type RefusedError struct {
	Socket     string
	HTTPStatus int
	Reason     string
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the agent at %s refused: %s", e.Socket, e.Reason)
}

// Client sends requests to the agent at one socket. Close it after use.
type Client struct {
	socket string
	http   http.Client
}

// NewClient makes a client; it connects with the first request.
func NewClient(socket string) *Client {
	return &Client{socket: socket, http: http.Client{
		Timeout: answerTimeout,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}},
	}}
}

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Status asks for the agent's status.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return get[Status](ctx, c, PathStatus, nil)
}

// Links asks for link groups.
func (c *Client) Links(ctx context.Context) (Links, error) {
	return get[Links](ctx, c, PathLinks, nil)
}

// Conns asks for connections.
func (c *Client) Conns(ctx context.Context) (Conns, error) {
	return get[Conns](ctx, c, PathConns, nil)
}

// ConnsOf asks for the connections of the pod NAMESPACE/NAME. An agent from before this question answers with the connections of
// all pods, as far as it shows them.
func (c *Client) ConnsOf(ctx context.Context, pod string) (Conns, error) {
	all, err := get[Conns](ctx, c, PathConns, url.Values{"pod": {pod}})
	all.Keep(pod)
	return all, err
}

// Attachments asks for attached pods.
func (c *Client) Attachments(ctx context.Context) (Attachments, error) {
	return get[Attachments](ctx, c, PathAttachments, nil)
}

// Devices asks for the devices that pods can have for themselves, or share.
func (c *Client) Devices(ctx context.Context) (Devices, error) {
	return get[Devices](ctx, c, PathDevices, nil)
}

// Explain asks why connections from src (an address, or namespace/name of a pod) to dst
// (address:port) are on SMC-R, or why not.
func (c *Client) Explain(ctx context.Context, src, dst string) (Explanation, error) {
	return get[Explanation](ctx, c, PathExplain, url.Values{"src": {src}, "dst": {dst}})
}

// Metrics asks for the agent's metrics, in the text format of Prometheus.
func (c *Client) Metrics(ctx context.Context) (string, error) {
	b, err := c.do(ctx, http.MethodGet, PathMetrics, nil)
	return string(b), err
}

// Sync makes the agent read the attachment records now.
func (c *Client) Sync(ctx context.Context) error {
	_, err := c.do(ctx, http.MethodPost, PathSync, nil)
	return err
}

// Handover asks the agent to hand the node over to the agent called instance, which is
// the one that asks. When Handover returns, the asked agent manages no pod any more, and
// its socket and metrics port are free.
func (c *Client) Handover(ctx context.Context, instance string) error {
	_, err := c.do(ctx, http.MethodPost, PathHandover, url.Values{"instance": {instance}})
	return err
}

func get[T any](ctx context.Context, c *Client, path string, q url.Values) (T, error) {
	var v T
	b, err := c.do(ctx, http.MethodGet, path, q)
	if err != nil {
		return v, err
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return v, fmt.Errorf("ask the agent at %s for %s: %w", c.socket, path, err)
	}
	return v, nil
}

func (c *Client) do(ctx context.Context, method, path string, q url.Values) (body []byte, err error) {
	u := url.URL{Scheme: "http", Host: "agent", Path: path, RawQuery: q.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("ask the agent: %w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.explain(err)
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	body, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("read the answer of the agent at %s: %w", c.socket, err)
	}
	if resp.StatusCode >= http.StatusBadRequest {
		var p Problem
		if json.Unmarshal(body, &p) != nil || p.Error == "" {
			p.Error = resp.Status
		}
		return nil, &RefusedError{Socket: c.socket, HTTPStatus: resp.StatusCode, Reason: p.Error}
	}
	return body, nil
}

// explain makes of an error of connecting one that says what to do.
func (c *Client) explain(err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("no permission for %s: run as root or as the agent's user", c.socket)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w: nothing answers on %s; start node-agent, or name its socket with --socket", ErrNotRunning, c.socket)
	}
	return fmt.Errorf("ask the agent at %s: %w", c.socket, err)
}

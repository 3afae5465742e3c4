// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// A claim is the right to manage the node: a lock on a file beside the API
// socket, which at most one agent holds. The kernel gives it back with the
// process, however that ends.
type claim struct {
	f    *os.File
	path string
}

// errClaimed says that another agent manages the node.
var errClaimed = errors.New("another agent manages this node, and does not answer: stop it, or choose another node.apiSocket")

func claimPath(socket string) string { return socket + ".lock" }

// tryClaim takes the claim if nobody has it.
func tryClaim(socket string) (*claim, error) {
	path := claimPath(socket)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("claim the node: %w", err)
	}
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("claim the node: %w", err)
		}
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil && !stands(f, path) {
			// Its holder removed the file between our open and our lock.
			_ = f.Close()
			continue
		}
		switch {
		case err == nil:
			return &claim{f: f, path: path}, nil
		case errors.Is(err, syscall.EWOULDBLOCK):
			err = errClaimed
		}
		return nil, errors.Join(fmt.Errorf("claim the node: lock %s: %w", path, err), f.Close())
	}
}

// stands tells whether the file is still the one at the path.
func stands(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Lstat(path)
	return err == nil && os.SameFile(a, b)
}

// answers tells whether an agent is at the socket.
func answers(ctx context.Context, socket string) bool {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	return err == nil && c.Close() == nil
}

func answersError(socket string) error {
	return fmt.Errorf("API socket %s: another agent answers there: stop it, choose another node.apiSocket, or set node.takeover for both", socket)
}

// release gives the claim back. The file goes first: whoever opened it before
// sees that it no longer stands.
func (c *claim) release() error {
	if err := errors.Join(os.Remove(c.path), c.f.Close()); err != nil {
		return fmt.Errorf("give the node's claim back: %w", err)
	}
	return nil
}

// wait waits, or returns false when ctx ends.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

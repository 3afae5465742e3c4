// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/smcr-io/kube-smcr/internal/files"
)

// A nodeLock is the right to manage the node: a lock on a file beside the API's socket, which one
// agent at most holds. If the agent dies, the kernel gives the lock back.
type nodeLock struct {
	*files.Lock
}

// errNodeLocked says that another agent holds the node's lock.
var errNodeLocked = errors.New("another agent manages this node, and does not answer: stop it, or choose another node.apiSocket")

func nodeLockPath(socket string) string { return socket + ".lock" }

// tryLockNode takes the node's lock if no other agent holds it.
func tryLockNode(socket string) (*nodeLock, error) {
	path := nodeLockPath(socket)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("lock the node: %w", err)
	}
	l, err := files.TryLock(path)
	switch {
	case errors.Is(err, files.ErrLocked):
		return nil, fmt.Errorf("lock the node: %s: %w", path, errNodeLocked)
	case err != nil:
		return nil, fmt.Errorf("lock the node: %w", err)
	}
	return &nodeLock{l}, nil
}

// socketAnswers reports whether an agent accepts connections on the API's socket.
func socketAnswers(ctx context.Context, socket string) bool {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	return err == nil && c.Close() == nil
}

func answersError(socket string) error {
	return fmt.Errorf("API socket %s: another agent answers there: stop it, choose another node.apiSocket, or set node.takeover for both", socket)
}

// release gives the node's lock back.
func (l *nodeLock) release() error {
	if err := l.Remove(); err != nil {
		return fmt.Errorf("unlock the node: %w", err)
	}
	return nil
}

// sleep waits for d and returns true, or returns false when ctx ends.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/smcr-io/kube-smcr/internal/files"
)

// lockAttachment waits until no other call works on the devices of an attachment, or
// until ctx ends. Runtimes should make one call at a time for an attachment; the lock is
// for those that do not:
//
//	ADD                     DEL (the runtime gave ADD up)
//	lock
//	makes the interface     waits for the lock
//	unlock
//	                        lock, takes the interface back
//
// The lock's file exists only while a call runs, or after a call was killed.
func lockAttachment(ctx context.Context, dataDir, containerID, ifName string) (*files.Lock, error) {
	if err := checkKey(containerID, ifName); err != nil {
		return nil, fmt.Errorf("lock attachment: %w", err)
	}
	path := filepath.Join(dataDir, "locks", containerID+"-"+ifName+".lock")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("lock attachment: %w", err)
	}
	l, err := files.LockWithin(ctx, path)
	if errors.Is(err, files.ErrLocked) {
		return nil, fmt.Errorf("lock attachment: another call for interface %s of container %s runs: %w", ifName, containerID, err)
	}
	if err != nil {
		return nil, fmt.Errorf("lock attachment: %w", err)
	}
	return l, nil
}

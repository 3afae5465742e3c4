// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// sandboxes are the network namespaces that the container runtime made for pods: the
// name of the namespace in the directory of namespaces, by the pod's UID.
type sandboxes map[string]string

// owner is the UID of the pod that has a namespace, "" if the runtime does not say.
func (s sandboxes) owner(namespace string) string {
	for uid, name := range s {
		if name == namespace {
			return uid
		}
	}
	return ""
}

// cachedResult is what the CNI library keeps of an ADD for the runtime, in one
// file for each interface. Libraries before 1.3 do not name the namespace.
type cachedResult struct {
	Kind  string      `json:"kind"`
	NetNS string      `json:"netns"`
	Args  [][2]string `json:"cniArgs"`
}

// readSandboxes reads the cache that the CNI library keeps for the runtime, in a
// directory that belongs to root. A file that cannot be read is left out, and so is a
// pod with several namespaces: it has an old sandbox that is about to be removed.
func readSandboxes(dir string) (sandboxes, error) {
	d, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the runtime's records of namespaces: %w", err)
	}
	defer func() { _ = d.Close() }() // it was only read
	names, err := d.Readdirnames(maxSandboxes)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read the runtime's records of namespaces: %w", err)
	}
	out, several := sandboxes{}, map[string]bool{}
	for _, name := range names {
		uid, namespace := readSandbox(filepath.Join(dir, name))
		if uid == "" || namespace == "" {
			continue
		}
		several[uid] = several[uid] || out[uid] != "" && out[uid] != namespace
		out[uid] = namespace
	}
	for uid, yes := range several {
		if yes {
			delete(out, uid)
		}
	}
	return out, nil
}

// readSandbox reads one file. Both names are "" if the file does not have them.
func readSandbox(path string) (uid, namespace string) {
	f, err := os.Open(path)
	if err != nil {
		return "", ""
	}
	defer func() { _ = f.Close() }() // it was only read
	b, err := io.ReadAll(io.LimitReader(f, maxSandboxBytes))
	var r cachedResult
	if err != nil || json.Unmarshal(b, &r) != nil || r.Kind != "cniCacheV1" || r.NetNS == "" {
		return "", ""
	}
	for _, a := range r.Args {
		if a[0] == "K8S_POD_UID" {
			return a[1], filepath.Base(r.NetNS)
		}
	}
	return "", ""
}

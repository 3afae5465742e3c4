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

	"github.com/smcr-io/kube-smcr/internal/records"
)

// sandboxes are the network namespaces that the container runtime made for pods: the
// name of the namespace in the directory of namespaces, by the pod as the runtime knows it.
type sandboxes map[records.Pod]string

// has says whether the runtime says whose a namespace is.
func (s sandboxes) has(namespace string) bool {
	for _, name := range s {
		if name == namespace {
			return true
		}
	}
	return false
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
	out, several := sandboxes{}, map[records.Pod]bool{}
	for _, name := range names {
		pod, namespace := readSandbox(filepath.Join(dir, name))
		if pod.UID == "" || namespace == "" {
			continue
		}
		several[pod] = several[pod] || out[pod] != "" && out[pod] != namespace
		out[pod] = namespace
	}
	for pod, yes := range several {
		if yes {
			delete(out, pod)
		}
	}
	return out, nil
}

// readSandbox reads one file. What the file does not have is empty.
func readSandbox(path string) (pod records.Pod, namespace string) {
	f, err := os.Open(path)
	if err != nil {
		return records.Pod{}, ""
	}
	defer func() { _ = f.Close() }() // it was only read
	b, err := io.ReadAll(io.LimitReader(f, maxSandboxBytes))
	var r cachedResult
	if err != nil || json.Unmarshal(b, &r) != nil || r.Kind != "cniCacheV1" || r.NetNS == "" {
		return records.Pod{}, ""
	}
	for _, a := range r.Args {
		switch a[0] {
		case "K8S_POD_NAMESPACE":
			pod.Namespace = a[1]
		case "K8S_POD_NAME":
			pod.Name = a[1]
		case "K8S_POD_UID":
			pod.UID = a[1]
		}
	}
	return pod, filepath.Base(r.NetNS)
}

// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/records"
)

const (
	// recordVersion is the version of the record of pods' devices. A reader accepts only
	// the version that it knows.
	recordVersion = 1
	recordName    = "kubelet.json"
)

// recorded is the content of the record.
type recorded struct {
	SchemaVersion int           `json:"schemaVersion"`
	Pods          []recordedPod `json:"pods"`
}

type recordedPod struct {
	Namespace string   `json:"namespace"`
	Name      string   `json:"name"`
	Devices   []string `json:"devices"`
}

func recordOf(dataDir string) records.Dir {
	return records.Dir{Path: filepath.Join(dataDir, "assignments"), MaxBytes: maxRecordBytes, MaxFiles: 1}
}

// ForgetAssignments removes the record from a data directory.
func ForgetAssignments(dataDir string) error {
	if err := recordOf(dataDir).RemoveAll(); err != nil {
		return fmt.Errorf("remove record of the devices that pods have: %w", err)
	}
	return nil
}

// readRecord returns the devices of pods. Without a record there are none.
func readRecord(dir records.Dir) (map[config.PodName][]string, error) {
	b, err := dir.Read(recordName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var r recorded
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("parse %s: %w", recordName, err)
	}
	if r.SchemaVersion != recordVersion {
		return nil, fmt.Errorf("%s has schema version %d, this program knows %d", recordName, r.SchemaVersion, recordVersion)
	}
	out := map[config.PodName][]string{}
	for _, p := range r.Pods {
		out[config.PodName{Namespace: p.Namespace, Name: p.Name}] = p.Devices
	}
	return out, nil
}

func writeRecord(dir records.Dir, pods map[config.PodName][]string) error {
	r := recorded{SchemaVersion: recordVersion}
	for pod, ids := range pods {
		r.Pods = append(r.Pods, recordedPod{Namespace: pod.Namespace, Name: pod.Name, Devices: ids})
	}
	slices.SortFunc(r.Pods, func(a, b recordedPod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return dir.Write(recordName, r)
}

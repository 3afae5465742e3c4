// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/files"
)

// stateVersion is the version of the file's format. Files of other versions are not read.
const stateVersion = 1

// state is the content of the file.
type state struct {
	Version int            `json:"version"`
	Node    string         `json:"node"`
	Objects config.Objects `json:"objects"`
}

// save replaces the file in one step, if the objects differ from those in it.
func (s *Source) save(o config.Objects) error {
	b, err := json.Marshal(state{Version: stateVersion, Node: s.cfg.Node, Objects: unversioned(o)})
	if err != nil {
		return fmt.Errorf("write %s: %w", s.cfg.StateFile, err)
	}
	s.file.Lock()
	defer s.file.Unlock()
	s.mu.Lock()
	pass := s.leaving || bytes.Equal(b, s.saved)
	s.mu.Unlock()
	if pass {
		return nil
	}
	err = os.MkdirAll(filepath.Dir(s.cfg.StateFile), 0o755)
	if err == nil {
		err = files.Write(s.cfg.StateFile, b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", s.cfg.StateFile, err)
	}
	s.mu.Lock()
	s.saved = b
	s.mu.Unlock()
	return nil
}

// forget removes the file. It is called after leaving was set, so that save does not
// write another one.
func (s *Source) forget() error {
	s.file.Lock()
	defer s.file.Unlock()
	if err := os.Remove(s.cfg.StateFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the last configuration: %w", err)
	}
	return nil
}

// unversioned drops the resource versions, which also change when nothing changes that is in the
// file.
func unversioned(o config.Objects) config.Objects {
	for i := range o.Policies {
		o.Policies[i].ResourceVersion = ""
	}
	for i := range o.Unresolved {
		o.Unresolved[i].ResourceVersion = ""
	}
	for i := range o.PeerSlices {
		o.PeerSlices[i].ResourceVersion = ""
	}
	return o
}

// restore reads the file.
func (s *Source) restore() (config.Objects, error) {
	f, err := os.Open(s.cfg.StateFile)
	if err != nil {
		return config.Objects{}, fmt.Errorf("last configuration: %w", err)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxStateBytes))
	if err = errors.Join(err, f.Close()); err != nil {
		return config.Objects{}, fmt.Errorf("last configuration: %w", err)
	}
	var st state
	if err := json.Unmarshal(b, &st); err != nil {
		return config.Objects{}, fmt.Errorf("last configuration: parse %s: %w", s.cfg.StateFile, err)
	}
	if st.Version != stateVersion || st.Node != s.cfg.Node {
		return config.Objects{}, fmt.Errorf("last configuration: %s is of node %q in format %d, want node %q in format %d",
			s.cfg.StateFile, st.Node, st.Version, s.cfg.Node, stateVersion)
	}
	return st.Objects, nil
}

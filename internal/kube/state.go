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
)

// stateVersion is that of the file's format; others are not read.
const stateVersion = 1

// state is what the file holds.
type state struct {
	Version int            `json:"version"`
	Node    string         `json:"node"`
	Objects config.Objects `json:"objects"`
}

// save writes the objects into the file in one step, if they differ from what
// it has.
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
	if err := writeFile(s.cfg.StateFile, b); err != nil {
		return fmt.Errorf("write %s: %w", s.cfg.StateFile, err)
	}
	s.mu.Lock()
	s.saved = b
	s.mu.Unlock()
	return nil
}

// forget removes the file. Once the agent is to leave, none is written again.
func (s *Source) forget() error {
	s.file.Lock()
	defer s.file.Unlock()
	if err := os.Remove(s.cfg.StateFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the last configuration: %w", err)
	}
	return nil
}

// unversioned leaves out what changes without meaning anything here.
func unversioned(o config.Objects) config.Objects {
	for i := range o.Policies {
		o.Policies[i].ResourceVersion = ""
	}
	for i := range o.PeerSlices {
		o.PeerSlices[i].ResourceVersion = ""
	}
	return o
}

// writeFile replaces a file: after an error, or a crash at any moment, the old
// one stands.
func writeFile(path string, b []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-"+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
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
		return config.Objects{}, fmt.Errorf("last configuration: %s is of node %q and version %d, want %q and %d", s.cfg.StateFile, st.Node, st.Version, s.cfg.Node, stateVersion)
	}
	return st.Objects, nil
}

// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/files"
)

// PluginConf is the configuration of the plugin in the list. The zero value of each field
// is the plugin's default.
type PluginConf struct {
	DataDir     string
	AgentSocket string
	// Required keeps every pod of the node from starting while the agent does not answer.
	Required bool
	// ReportStatus makes the node NotReady while the agent is away.
	ReportStatus bool
	// IPAM is the configuration of the IPAM plugin for the devices that pods claimed, a JSON
	// object; empty: they get no addresses.
	IPAM json.RawMessage
}

// Config says what to install where. All paths are as this process sees them.
type Config struct {
	BinSource string // the plugin's program
	BinDir    string // where the container runtime looks for plugins
	ConfDir   string // where it looks for networks
	Plugin    PluginConf
	Log       *slog.Logger
}

// Validate tells whether the configuration makes sense.
func (c Config) Validate() error {
	for _, p := range []struct{ name, path string }{{"BinSource", c.BinSource}, {"BinDir", c.BinDir}, {"ConfDir", c.ConfDir}} {
		if !filepath.IsAbs(p.path) {
			return fmt.Errorf("CNI installation: %s %q is not an absolute path", p.name, p.path)
		}
	}
	entry, err := c.Plugin.entry()
	if err != nil {
		return err
	}
	var full map[string]any
	if err := json.Unmarshal(entry, &full); err != nil {
		return fmt.Errorf("CNI installation: %w", err)
	}
	full["cniVersion"], full["name"] = "1.0.0", "network" // as a runtime adds them
	b, err := json.Marshal(full)
	if err != nil {
		return fmt.Errorf("CNI installation: %w", err)
	}
	nc, err := cni.ParseNetConf(b)
	if err == nil {
		err = cni.CheckDataDirName(nc.DataDir)
	}
	var ce *types.Error
	switch {
	case errors.As(err, &ce):
		return fmt.Errorf("CNI installation: %s: %s", ce.Msg, ce.Details)
	case err != nil:
		return fmt.Errorf("CNI installation: %w", err)
	case len(c.Plugin.IPAM) > 0 && nc.IPAM.Type == "": // the plugin would take it for none
		return fmt.Errorf("CNI installation: IPAM %.100q has no type", c.Plugin.IPAM)
	}
	return nil
}

// entry is the plugin's element of the list.
func (p PluginConf) entry() ([]byte, error) {
	b, err := json.Marshal(struct {
		Type         string `json:"type"`
		Managed      bool   `json:"smcr.io/managed"`
		DataDir      string `json:"dataDir,omitempty"`
		AgentSocket  string `json:"agentSocket,omitempty"`
		Required     bool   `json:"required,omitempty"`
		ReportStatus bool   `json:"reportStatus,omitempty"`

		IPAM json.RawMessage `json:"ipam,omitempty"`
	}{
		Type: cni.PluginType, Managed: true, DataDir: p.DataDir, AgentSocket: p.AgentSocket,
		Required: p.Required, ReportStatus: p.ReportStatus, IPAM: p.IPAM,
	})
	if err != nil {
		return nil, fmt.Errorf("CNI installation: %w", err)
	}
	return b, nil
}

// Installer installs the plugin on one node.
type Installer struct {
	c     Config
	log   *slog.Logger
	entry []byte
	ipam  string // the name of the IPAM plugin in entry; "": none
	data  string // the data directory in entry
	now   func() time.Time
	grace time.Duration // reloadGrace, less in tests

	// Owned by Run, or by Uninstall after it.
	bin       binary
	invalid   map[string]time.Time // since when a file is not valid
	writes    []time.Time          // of the last minute
	contested bool                 // another program keeps taking the plugin out; logged

	mu     sync.Mutex
	status Status
}

// New makes an installer. It touches nothing yet.
func New(c Config) (*Installer, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	entry, err := c.Plugin.entry()
	if err != nil {
		return nil, err
	}
	conf, err := cni.ParseNetConf(entry)
	if err != nil {
		return nil, fmt.Errorf("CNI installation: %w", err)
	}
	in := &Installer{
		c: c, log: c.Log, entry: entry, ipam: conf.IPAM.Type, data: conf.DataDir, now: time.Now, grace: reloadGrace,
		bin:     binary{source: c.BinSource, dir: c.BinDir, name: cni.PluginType},
		invalid: map[string]time.Time{},
	}
	if in.log == nil {
		in.log = slog.New(slog.DiscardHandler)
	}
	in.status = Status{State: StateStarting, Since: in.now()}
	return in, nil
}

// Status is the present status.
func (in *Installer) Status() Status {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.status
}

// update changes the status, and logs a change of more than its counters.
func (in *Installer) update(fn func(*Status)) {
	in.mu.Lock()
	old := in.status
	fn(&in.status)
	s := in.status
	if s.State != old.State {
		s.Since = in.now()
		in.status.Since = s.Since
	}
	in.mu.Unlock()
	if s.State == old.State && s.Detail == old.Detail && s.File == old.File {
		return
	}
	switch s.State {
	case StateBroken:
		in.log.Warn("CNI plugin not installed; new pods may stay on plain TCP", "detail", s.Detail)
	case StateContested: // pass has logged it
	default:
		in.log.Info("CNI installation", "state", string(s.State), "file", s.File, "network", s.Network, "detail", s.Detail)
	}
}

// pass brings the node in line once and updates the status. The caller has the lock. If
// another program changes a file in between, pass begins anew, up to maxAttempts times.
func (in *Installer) pass() {
	var d decision
	var err error
	for range maxAttempts {
		if d, err = in.once(); !errors.Is(err, errChanged) {
			break
		}
	}
	switch {
	case errors.Is(err, errContested) && !in.contested:
		in.contested = true
		in.log.Warn("another program keeps changing the network's configuration", "file", d.active, "perMinute", maxRepairsPerMinute)
	case err == nil && len(in.recent()) == 0:
		in.contested = false
	}
	switch {
	case errors.Is(err, errContested), err == nil && in.contested:
		// Contested also while the plugin is in the list: the other program takes it out
		// again soon.
		d.state = StateContested
		d.detail = join(fmt.Sprintf("another program changes %s whenever smcr-cni is put in (at most %d times a minute): tell it to leave foreign plugins alone (Cilium: cni.exclusive=false)",
			d.active, maxRepairsPerMinute), d.detail)
	case errors.Is(err, errChanged):
		d.state, d.detail = StateWaiting, join(err.Error(), d.detail)
	case err != nil:
		d.state, d.detail = StateBroken, join(advise(err), d.detail)
	}
	d.detail = join(d.detail, in.noIPAM())
	in.update(func(s *Status) {
		s.State, s.Detail, s.File, s.Network, s.CNIVersion = d.state, d.detail, d.active, d.network, d.version
	})
}

// noIPAM says that the IPAM plugin is not where container runtimes look for plugins; "" if
// it is, or if there is to be none.
func (in *Installer) noIPAM() string {
	if in.ipam == "" {
		return ""
	}
	path := filepath.Join(in.c.BinDir, in.ipam)
	if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
		return ""
	}
	return fmt.Sprintf("there is no IPAM plugin %s, so pods that claimed VFs do not start: install it on the node, or correct dra.ipam", path)
}

// errContested means that the configuration was written maxRepairsPerMinute times in the
// last minute.
var errContested = errors.New("contested")

// recent are the times of the writes of the last minute.
func (in *Installer) recent() []time.Time {
	since := in.now().Add(-time.Minute)
	in.writes = slices.DeleteFunc(in.writes, func(t time.Time) bool { return t.Before(since) })
	return in.writes
}

func (in *Installer) once() (decision, error) {
	files, err := scan(in.c.ConfDir)
	if err != nil {
		return decision{}, err
	}
	d := decide(files, goal{entry: in.entry, unfinished: in.unfinished(files)})
	if err := cni.CheckDataDir(in.data); err != nil {
		// No pod can start while a list names a plugin that refuses all of them. The program stays up to date: further
		// networks may have it, with directories of their own.
		cerr := in.copy()
		return d, errors.Join(err, in.carryOut(decide(files, goal{unfinished: never}).changes), cerr)
	}
	if d.newer && in.bin.usable() {
		// A later version was installed before. Its binary understands this version's
		// entry, but this version's binary does not understand the later entry: so the
		// entry is changed before the binary is replaced.
		if err := in.carryOut(d.changes); err != nil {
			return d, err
		}
		return d, in.copy()
	}
	if err := in.copy(); err != nil {
		if !in.bin.usable() && chainedIn(files) {
			// No pod can start while a list names a plugin that is not there.
			d = decide(files, goal{unfinished: never})
			err = errors.Join(err, in.carryOut(d.changes))
		}
		return d, err
	}
	return d, in.carryOut(d.changes)
}

func never(string) bool { return false }

// unfinished remembers since when files are not valid, and returns a function that tells
// whether a file has been so for less than invalidGrace.
func (in *Installer) unfinished(files []file) func(string) bool {
	now := in.now()
	next := map[string]time.Time{}
	for _, f := range files {
		if f.err == nil {
			continue
		}
		next[f.name] = now
		if since, ok := in.invalid[f.name]; ok {
			next[f.name] = since
		}
	}
	in.invalid = next
	return func(name string) bool { return now.Sub(next[name]) < invalidGrace }
}

// copy puts the plugin's binary in place, if it is not there yet.
func (in *Installer) copy() error {
	changed, err := in.bin.install()
	if changed {
		in.log.Info("installed the CNI plugin", "path", in.bin.path())
		in.update(func(s *Status) { s.Copies++ })
	}
	return err
}

// carryOut makes the changes in order, up to the first error.
func (in *Installer) carryOut(changes []change) error {
	for _, c := range changes {
		if len(in.recent()) >= maxRepairsPerMinute {
			return errContested
		}
		err := apply(in.c.ConfDir, c)
		if err == nil || errors.Is(err, errChanged) {
			in.writes = append(in.writes, in.now())
		}
		if err != nil {
			return err
		}
		in.log.Info("changed a network's configuration", "file", c.name, "removed", c.new == nil, "fieldsRemoved", c.dropped)
		in.update(func(s *Status) { s.Repairs++ })
	}
	return nil
}

// Uninstall takes the plugin out of the network's configuration, and reloadGrace later
// removes its binary. Run must have ended. What other programs wrote stays. Uninstall may
// be called again after an error.
func (in *Installer) Uninstall(ctx context.Context) error {
	l, err := in.lock(ctx, lockTimeout)
	if err != nil {
		return fmt.Errorf("uninstall the CNI plugin: %w", err)
	}
	if l != nil {
		defer func() { _ = l.Unlock() }() // the error is that of closing a directory
	}
	errs := []error{removeTemps(in.c.ConfDir), removeTemps(in.c.BinDir)}
	changed, err := in.unchain()
	if err != nil {
		// The binary stays: a list may still name it.
		return fmt.Errorf("uninstall the CNI plugin: %w", errors.Join(append(errs, err)...))
	}
	if changed {
		pause(ctx, in.grace)
	}
	gone, err := in.bin.remove()
	if gone {
		in.log.Info("removed the CNI plugin", "path", in.bin.path())
	}
	if err := errors.Join(append(errs, err)...); err != nil {
		return fmt.Errorf("uninstall the CNI plugin: %w", err)
	}
	in.update(func(s *Status) { *s = Status{State: StateAbsent, Since: s.Since, Repairs: s.Repairs, Copies: s.Copies} })
	return nil
}

// unchain takes what this package wrote out of every configuration.
func (in *Installer) unchain() (changed bool, err error) {
	for range maxAttempts {
		var files []file
		if files, err = scan(in.c.ConfDir); err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
			return changed, err
		}
		d := decide(files, goal{unfinished: never})
		if d.state == StateBroken {
			err = errors.New(d.detail)
		}
		for _, c := range d.changes {
			if aerr := apply(in.c.ConfDir, c); aerr != nil {
				err = errors.Join(err, aerr)
				continue
			}
			changed = true
			in.log.Info("took smcr-cni out of a network's configuration", "file", c.name, "removed", c.new == nil)
		}
		if !errors.Is(err, errChanged) {
			return changed, err
		}
	}
	return changed, err
}

// errBusy means that another installer has the lock on the directory of the
// configurations. It may be in another container that mounts the same directory.
var errBusy = errors.New("another installer is at work on this node")

func tryLock(path string) (*files.Lock, error) { return locked(files.TryLockDir(path)) }

func locked(l *files.Lock, err error) (*files.Lock, error) {
	switch {
	case errors.Is(err, files.ErrLocked):
		return nil, errBusy
	case err != nil:
		return nil, fmt.Errorf("lock the directory of the networks: %w", err)
	}
	return l, nil
}

// lock waits for the lock. It returns nil if the directory does not exist.
func (in *Installer) lock(ctx context.Context, most time.Duration) (*files.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	l, err := locked(files.LockDirWithin(ctx, in.c.ConfDir))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.Is(err, errBusy):
		return nil, fmt.Errorf("wait for the lock on %s: %w", in.c.ConfDir, err)
	}
	return l, err
}

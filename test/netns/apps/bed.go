// SPDX-License-Identifier: Apache-2.0

package apps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

// A mode is how pods are opted in.
type mode int

const (
	plain mode = iota // no agent knows of the pods
	smcr              // holdSYNs: false
	held              // holdSYNs: true
	modes
)

func (m mode) String() string { return [...]string{"plain", "SMC-R", "held"}[m] }

// cniDir is where distributions put the CNI plugins.
const cniDir = "/usr/lib/cni"

// A bed is where suites run in one mode. It is owned by one goroutine at a time.
type bed struct {
	mode           mode
	lab            *lab.Lab
	client, server *lab.Pod
	agents         []*lab.Agent // of both nodes, or none
}

// newBed makes a bed, with the programs of ours in bin.
func newBed(ctx context.Context, m mode, bin string) (_ *bed, err error) {
	b := &bed{mode: m}
	if b.lab, err = lab.New(lab.Config{PluginDirs: []string{bin, cniDir}, Routed: true}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.lab.Close())
		}
	}()
	for i, p := range []**lab.Pod{&b.client, &b.server} {
		if *p, err = b.lab.Nodes[i].AddPod(ctx, lab.PodConfig{Name: [...]string{"client", "server"}[i], WithoutSMCR: m == plain}); err != nil {
			return nil, err
		}
	}
	if m == plain {
		return b, nil
	}
	for _, n := range b.lab.Nodes {
		a, err := n.StartAgent(lab.AgentConfig{Binary: filepath.Join(bin, "node-agent"), Node: fmt.Sprintf("  holdSYNs: %t\n", m == held)})
		if err != nil {
			return nil, err
		}
		b.agents = append(b.agents, a)
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for _, a := range b.agents {
		if err := a.WaitReady(ctx, 1); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// close removes the bed, and says what it could not remove.
func (b *bed) close() error {
	err := b.lab.Close()
	left, lerr := b.lab.Leftovers()
	if len(left) > 0 {
		lerr = errors.Join(lerr, fmt.Errorf("left behind: %s", strings.Join(left, ", ")))
	}
	return errors.Join(err, lerr)
}

// carried is how many connections the client's agent has carried by SMC-R so far.
func (b *bed) carried(ctx context.Context) (uint64, error) {
	s, err := b.agents[0].API.Status(ctx)
	return s.Conns.TotalSMCR, err
}

// dir is the directory of the copy of a suite.
func (b *bed) dir(name string) string { return filepath.Join(b.client.Node.Dir, name) }

// copy copies a suite from where it is kept.
func (b *bed) copy(ctx context.Context, name, from string) error {
	if text, err := exec.CommandContext(ctx, "cp", "-a", from, b.dir(name)).CombinedOutput(); err != nil {
		return fmt.Errorf("copy %s: %w: %s", from, err, text)
	}
	return nil
}

// An edit replaces text in a file of a suite. The text must be there.
type edit struct{ file, from, to string }

// edit changes the copy of a suite.
func (b *bed) edit(name string, edits ...edit) error {
	for _, e := range edits {
		file := filepath.Join(b.dir(name), e.file)
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if !bytes.Contains(text, []byte(e.from)) {
			return fmt.Errorf("%s does not have %q", file, e.from)
		}
		if err := os.WriteFile(file, bytes.ReplaceAll(text, []byte(e.from), []byte(e.to)), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// address puts the server's address in the place of 127.0.0.1 into all files of a
// directory of a suite, but where it is preceded by but.
func (b *bed) address(name, dir, but string) error {
	const local = "127.0.0.1"
	return b.replace(name, dir, but+local, but+local, local, b.server.Addr4.String())
}

// replace replaces text in all files of a directory of a suite: pairs of what is there
// and what takes its place.
func (b *bed) replace(name, dir string, pairs ...string) error {
	replacer := strings.NewReplacer(pairs...)
	return filepath.WalkDir(filepath.Join(b.dir(name), dir), func(file string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		s := replacer.Replace(string(text))
		if s == string(text) {
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		return os.WriteFile(file, []byte(s), info.Mode().Perm())
	})
}

// program puts a script into the copy of a suite, which starts a program of the
// machine there.
func (b *bed) program(name, file, script string) error {
	file = filepath.Join(b.dir(name), file)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, []byte("#!/bin/sh\n"+script+"\n"), 0o755)
}

// inServer is the beginning of a command line in the server's pod.
func (b *bed) inServer() string { return strings.Join(b.server.Entry(), " ") }

// run runs a command in the copy of a suite, in the client's network namespace, and
// returns what it wrote. It ends without an error if the command ended by itself
// within the time.
func (b *bed) run(ctx context.Context, dir string, args ...string) (string, error) {
	var out bytes.Buffer
	p, err := b.client.StartTrusted(lab.Command{
		Args:   append([]string{"sh", "-c", `cd "$0" && exec "$@" 2>&1`, dir}, args...),
		Stdout: &out,
	})
	if err != nil {
		return "", err
	}
	err = p.Wait(ctx)
	var exit *lab.ExitError
	if errors.As(err, &exit) && ctx.Err() == nil {
		err = nil // some of its tests failed
	}
	return out.String(), err
}

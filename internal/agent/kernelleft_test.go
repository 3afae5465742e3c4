// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

func (s *fakeSMC) mayHave(n podNet) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, is := s.pods[n.id()]
	return is, s.mayHaveErr
}

// Where the datapath was switched off while its record is still there, pods that it never had are the agent's. One that it has stays as it
// is, says why, and leaves it when that can be done; until then nothing is taken from the node.
func TestKernelPath_switchedOff(t *testing.T) {
	for _, policies := range []string{preferAll, kernelPreferred} {
		b, s := newKernelBench(t, policies)
		s.pins, s.openErr = true, &kernelpath.MissingError{Missing: kernelpath.NoPins, Err: os.ErrNotExist}
		s.pods[2] = kernelpath.PodConfig{}
		p, chosen := b.attach("a", 1), b.attach("b", 2)
		b.start()
		for range 2 {
			b.sync()
			if a := b.attachment("a"); a.State != agentapi.StateReady || a.Datapath != "" || a.Detail != "" {
				t.Errorf("attachment %+v", a)
			}
			if a := b.attachment("b"); a.State != agentapi.StateIdle || !strings.Contains(a.Detail, "an earlier agent may have put it: ") || !strings.Contains(a.Detail, "NoPins") {
				t.Errorf("attachment of a pod that is chosen %+v", a)
			}
			b.kernel.change(func() {
				if chosen.redir != nil || len(p.ports) != 2 || b.kernel.opened != 1 {
					t.Errorf("redirection %v of a pod that is chosen, %d listeners of the other one, %d handles", chosen.redir, len(p.ports), b.kernel.opened)
				}
			})
		}
		must(t, b.store.Delete("b", "eth0"))
		b.sync()
		s.change(func() {
			if !s.pins || s.removed != 0 {
				t.Error("the record is gone, while the program may be at work")
			}
		})
		b.record("b", 2)
		s.change(func() { s.openErr = nil })
		b.policies(preferAll)
		if _, is := s.pod(2); is || b.attachment("b").State != agentapi.StateReady {
			t.Errorf("chosen %t, attachment %+v", is, b.attachment("b"))
		}
	}
}

// Where the policy wants the kernel's and nothing else, a pod that is on it says so.
func TestKernelPath_switchedOffAll(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	s.pins, s.openErr = true, &kernelpath.MissingError{Missing: kernelpath.NoPins, Err: os.ErrNotExist}
	s.pods[2] = kernelpath.PodConfig{}
	b.attach("a", 1)
	b.attach("b", 2)
	b.start()
	for name, chosen := range map[string]bool{"a": false, "b": true} {
		if a := b.attachment(name); a.State != agentapi.StateFailed || strings.Contains(a.Detail, "an earlier agent may have put it: ") != chosen || !strings.Contains(a.Detail, "NoPins") {
			t.Errorf("attachment %+v", a)
		}
	}
}

// A pod that cannot be looked at stays as it is, too.
func TestKernelPath_switchedOffUnseen(t *testing.T) {
	b, s := newKernelBench(t, preferAll)
	s.pins, s.openErr, s.mayHaveErr = true, errors.New("no program"), errors.New("no nftables")
	b.attach("a", 1)
	b.start()
	if a := b.attachment("a"); a.State != agentapi.StateIdle || !strings.Contains(a.Detail, "no program") || !strings.Contains(a.Detail, "no nftables") || b.kernel.handles() != 0 {
		t.Errorf("attachment %+v, %d handles", a, b.kernel.handles())
	}
}

// The filter of the option in a pod says that an agent put it on its kernel's SMC-R.
func TestLinuxSMC_mayHave(t *testing.T) {
	ns := newSpace(t).ns
	for _, want := range []bool{false, true, false} {
		if want {
			must(t, linux.FilterOption(linux.In(ns), linux.OptionFilterConfig{}))
		}
		if got, err := (linuxSMC{}).mayHave(linuxNet{ns}); got != want || err != nil {
			t.Errorf("%t, %v, want %t", got, err, want)
		}
		must(t, linux.SweepOptionFilter(linux.In(ns)))
	}
}

// A program of a pod that may do so can flush the rules in the pod's namespace: the filter is found missing there, too.
func TestLinuxChooser_filtered(t *testing.T) {
	ns := newSpace(t).ns
	must(t, linux.FilterOption(linux.In(ns), linux.OptionFilterConfig{}))
	for _, want := range []bool{true, false} {
		if got, err := (&linuxChooser{}).filtered(linuxNet{ns}); got != want || err != nil {
			t.Errorf("%t, %v, want %t", got, err, want)
		}
		must(t, ns.Do(func() error {
			conn, err := nftables.New()
			if err != nil {
				return err
			}
			conn.FlushRuleset()
			return conn.Flush()
		}))
	}
}

// What the agent before this one diverted in a pod that is its kernel's now ends. If that agent handed over, and carries the connections
// on, they keep what they need.
func TestManager_attachKernelAfter(t *testing.T) {
	for before, want := range map[string][2]int{"": {1, 0}, "old": {0, 1}} {
		bench, s := newKernelBench(t, kernelPreferred)
		b := newBare(t, bench)
		b.a.tookFrom = before
		in := b.kernel.add("/netns/a", 1)
		p := &pod{atts: []cni.Attachment{attachmentOf("a", "192.0.2.1/24")}, set: b.a.rnics.Node()}
		if done := b.a.manager.stepKernel(p, false, time.Now()); !done || p.state != podKernel || s.attached != 1 {
			t.Errorf("done %t, pod %+v", done, p)
		}
		if got := [2]int{in.sweeps, in.ends}; got != want {
			t.Errorf("after agent %q: %d sweeps and ends of the diversion, want %d", before, got, want)
		}
	}
}

// A record that outlived the boot, or pins of another agent, say nothing of what this kernel can do: it is tried.
func TestLinuxSMC_openProbes(t *testing.T) {
	cannot := errors.New("this kernel has no such protocol")
	for _, left := range []struct {
		name         string
		record, pins bool
	}{{name: "nothing"}, {name: "the record", record: true}, {name: "pins", pins: true}} {
		data, pins := t.TempDir(), t.TempDir()
		s := newLinuxSMC(data)
		s.dir, s.probe = pins, func() error { return cannot }
		if left.record {
			must(t, os.WriteFile(kernelRecord(data), []byte("[]"), 0o600))
		}
		if left.pins {
			must(t, os.WriteFile(pins+"/choose_protocol", nil, 0o600))
		}
		if c, err := s.open(nil); !errors.Is(err, cannot) {
			t.Errorf("%s left: %v, %v", left.name, c, err)
		}
	}
}

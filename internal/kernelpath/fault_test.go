// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// otherProgram puts another program on the hook, which wants TCP to stay TCP. Until the end of the test
// that is so for the whole guest where it is first.
func otherProgram(t *testing.T) {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "other", Type: ebpf.Tracing, AttachType: ebpf.AttachModifyReturn, AttachTo: hook, License: "GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, 0, asm.DWord),  // family
			asm.LoadMem(asm.R3, asm.R1, 16, asm.DWord), // protocol
			asm.Mov.Imm(asm.R0, 0),
			asm.JNE.Imm(asm.R2, unix.AF_INET, "end"),
			asm.JNE.Imm(asm.R3, unix.IPPROTO_TCP, "end"),
			asm.Mov.Imm(asm.R0, unix.IPPROTO_TCP),
			asm.Return().WithSymbol("end"),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	l, err := link.AttachTracing(link.TracingOptions{Program: p, AttachType: ebpf.AttachModifyReturn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(l.Close(), p.Close()); err != nil {
			t.Error(err)
		}
	})
}

// Of the programs on the hook the last one decides: ours gets before another one that came later when it is asked
// to, and when the next agent opens it.
func TestChooser_overtaken(t *testing.T) {
	need(t)
	dir := bpffs(t)
	ns, cookie := scratch(t)
	c := mustOpen(t, Config{Dir: dir})
	t.Cleanup(func() {
		mustClose(t, c)
		if err := Unpin(dir); err != nil {
			t.Error(err)
		}
	})
	if err := c.Choose(Choice{NetNS: cookie}); err != nil {
		t.Fatal(err)
	}
	expect := func(when, want string) {
		t.Helper()
		if got := tcpIn(t, ns); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	lead := func(want bool) {
		t.Helper()
		if was, err := c.Lead(); err != nil || was != want {
			t.Errorf("overtaken %t, %v; want %t", was, err, want)
		}
	}
	lead(false)
	otherProgram(t)
	expect("another program came later", isTCP)
	lead(true)
	expect("ours was brought before it", isSMC)
	lead(false)
	otherProgram(t)
	expect("one more came", isTCP)
	mustClose(t, c)
	c = mustOpen(t, Config{Dir: dir})
	expect("opened anew", isSMC)
	lead(false)
	if rules, err := c.Rules(); err != nil || len(rules) != 1 || rules[0].Sockets != 2 {
		t.Errorf("rules %+v, %v", rules, err)
	}
}

// A program that the verifier refuses is told from what the kernel lacks, with the verifier's words.
func TestLoadError_refused(t *testing.T) {
	need(t)
	spec, err := loadProgram()
	if err != nil {
		t.Fatal(err)
	}
	spec.Programs["choose_protocol"].Instructions = asm.Instructions{asm.Return()} // of a register that was not set
	var o programObjects
	if err = spec.LoadAndAssign(&o, nil); err == nil {
		_ = o.Close()
		t.Fatal("the program was loaded")
	}
	var missing *MissingError
	if refusal := loadError(err); !errors.As(refusal, &missing) || missing.Missing != Refused || !strings.Contains(refusal.Error(), "R0 !read_ok") {
		t.Errorf("%v, of %v", refusal, err)
	}
}

// The module cannot be taken from the kernel while the program gives pods its protocol: their sockets would be
// refused.
func TestOpen_keepsModule(t *testing.T) {
	need(t)
	c := mustOpen(t, Config{})
	defer mustClose(t, c)
	if out, err := exec.Command("rmmod", "smc_diag", "smc").CombinedOutput(); err == nil || !strings.Contains(string(out), "in use") {
		t.Errorf("rmmod: %v\n%s", err, out)
	}
	if out, err := exec.Command("modprobe", "smc_diag").CombinedOutput(); err != nil { // which had no user
		t.Errorf("modprobe: %v\n%s", err, out)
	}
}

// A full table of enterprise IDs says so, and what to do.
func TestAddUEIDs_full(t *testing.T) {
	need(t)
	record := t.TempDir() + "/ueids.json"
	before, err := smcnl.UEIDs()
	if err != nil {
		t.Fatal(err)
	}
	for i := len(before); i < maxUEIDs; i++ {
		id := "FOREIGN" + string(rune('A'+i))
		if err := smcnl.AddUEID(id); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = smcnl.RemoveUEID(id) })
	}
	err = AddUEIDs([]string{"ONE.MORE"}, record)
	if !errors.Is(err, unix.ERANGE) || !strings.Contains(err.Error(), "room for 4") || !strings.Contains(err.Error(), "FOREIGND") {
		t.Errorf("a full table: %v", err)
	}
	if err := RemoveUEIDs(record); err != nil {
		t.Error(err)
	}
}

// A namespace that ends while a pod is attached leaves a rule that does nothing, and can be forgotten.
func TestChooser_namespaceGone(t *testing.T) {
	need(t)
	c := mustOpen(t, Config{})
	defer mustClose(t, c)
	ns, err := linux.ScratchNetNS()
	if err != nil {
		t.Fatal(err)
	}
	if err := ns.Close(); err != nil {
		t.Fatal(err)
	}
	if err := c.Attach(linux.In(ns), PodConfig{}); !errors.Is(err, linux.ErrClosed) {
		t.Errorf("attach: %v", err)
	}
	if rules, err := c.Rules(); err != nil || len(rules) != 0 {
		t.Errorf("rules %+v, %v", rules, err)
	}
}

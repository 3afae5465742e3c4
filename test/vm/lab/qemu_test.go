// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"slices"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/test/vm/lab/image"
)

// Each guest has its processors, and each of its disks as it is at first.
func TestArguments_machine(t *testing.T) {
	cfg := Config{Name: "arguments", Processors: 2, Disks: []string{"/a", "/b"}}
	if err := cfg.setDefaults(); err != nil {
		t.Fatal(err)
	}
	all := strings.Join(newLab(cfg, t.TempDir()).Guest(0).arguments(image.Files{}, "initrd"), " ")
	for _, want := range []string{
		"-smp 2 ", "tb-size=512 ", "id=disk0,format=raw,snapshot=on,cache=unsafe,file.locking=off,file=/a ",
		"id=disk1,format=raw,snapshot=on,cache=unsafe,file.locking=off,file=/b ", "virtio-blk-pci,drive=disk0,addr=0x1a ", "virtio-blk-pci,drive=disk1,addr=0x1b",
	} {
		if !strings.Contains(all, want) {
			t.Errorf("QEMU is started without %q: %s", want, all)
		}
	}
	for _, wrong := range []Config{{Processors: maxProcessors + 1}, {Processors: -1}, {Disks: make([]string, maxDisks+1)}} {
		if err := wrong.setDefaults(); err == nil {
			t.Errorf("%+v is a configuration", wrong)
		}
	}
}

// Containers get the accounts of memory that other guests do without, and who measures nothing coarse timers;
// nothing else changes.
func TestArguments_kernel(t *testing.T) {
	line := func(cfg Config) []string {
		cfg.Name = "arguments"
		if err := cfg.setDefaults(); err != nil {
			t.Fatal(err)
		}
		args := newLab(cfg, t.TempDir()).Guest(0).arguments(image.Files{}, "initrd")
		return strings.Fields(args[slices.Index(args, "-append")+1])
	}
	without := line(Config{})
	i := slices.Index(without, noMemoryAccounts)
	if with := line(Config{Containers: true}); i < 0 || !slices.Equal(with, slices.Delete(slices.Clone(without), i, i+1)) {
		t.Errorf("with containers %q, without %q; want all but %s", with, without, noMemoryAccounts)
	}
	if with := line(Config{CoarseTimers: true}); !slices.Equal(with, append(slices.Clone(without), coarseTimers)) {
		t.Errorf("with coarse timers %q, without %q; want %s behind it", with, without, coarseTimers)
	}
}

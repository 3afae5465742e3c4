// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"

	"github.com/smcr-io/kube-smcr/test/vm/vf/report"
)

// What a plugin with tag smcrcrash reads.
const (
	crashAfterEnv = "SMCR_CRASH_AFTER"
	crashLogEnv   = "SMCR_CRASH_LOG"
)

// maxSteps is more than a plugin has.
const maxSteps = 100

// A victim is a pod in whose call the plugin is killed.
type victim struct {
	pod
	report.Crash
}

// crash kills the plugin after its first step, after its second, and so on, for as
// many pods at a time as there are devices.
func (o options) crash(ctx context.Context) ([]report.Crash, error) {
	n, err := o.network()
	if err != nil {
		return nil, err
	}
	before, err := host(o.dataDir)
	if err != nil {
		return nil, err
	}
	devices, recoveries := strings.Split(o.devices, ","), strings.Split(o.recover, ",")
	var crashes []report.Crash
	for batch := 0; ; batch++ {
		victims := make([]*victim, len(devices))
		for i, d := range devices {
			after := batch*len(devices) + i + 1
			v := &victim{pod: o.podNamed(fmt.Sprintf("%s-%d", o.container, after))}
			v.device, v.mac = d, fmt.Sprintf("02:00:00:00:79:%02x", i)
			v.After, v.Recovery = after, recoveries[batch%len(recoveries)]
			victims[i] = v
		}
		if victims[0].After > maxSteps {
			return crashes, fmt.Errorf("the plugin has more than %d steps", maxSteps)
		}
		differences, err := o.kill(ctx, n, victims, before)
		for _, v := range victims {
			if v.Step != "" { // it was killed
				crashes = append(crashes, v.Crash)
			}
		}
		if len(differences) > 0 && len(crashes) > 0 { // what follows would say nothing
			crashes[len(crashes)-1].Differences = differences
			return crashes, err
		}
		if err != nil || victims[len(victims)-1].Step == "" {
			return crashes, err
		}
	}
}

// kill kills the plugin in the call of each, brings the machine back, and returns
// how it differs from before.
func (o options) kill(ctx context.Context, n network, victims []*victim, before report.Host) ([]string, error) {
	if err := each(victims, func(v *victim) error { return o.crashAfter(ctx, n, v) }); err != nil {
		return nil, err
	}
	recovery := victims[0].Recovery
	if recovery == "gc" { // one call for all of them
		if err := must(n.call(ctx, "gc", victims[0].pod)); err != nil {
			victims[0].Error = err.Error()
		}
	} else if err := o.bringBack(ctx, n, victims); err != nil {
		return nil, err
	}
	now, err := host(o.dataDir)
	if err != nil {
		return nil, err
	}
	if recovery == "gc" {
		// host-local keeps the address: it knows no GC.
		now.Files = slices.DeleteFunc(now.Files, func(name string) bool { return strings.HasPrefix(name, ipamDir) })
		if err := each(victims, func(v *victim) error { return must(n.call(ctx, "del", v.pod)) }); err != nil {
			return nil, err
		}
	}
	return before.Differences(now), each(victims, func(v *victim) error { return delNetNS(ctx, v.container) })
}

// each does something for all of them at the same time.
func each(victims []*victim, do func(*victim) error) error {
	errs := make([]error, len(victims))
	var running sync.WaitGroup
	for i, v := range victims {
		running.Go(func() {
			if err := do(v); err != nil {
				errs[i] = fmt.Errorf("killed after %d steps: %w", v.After, err)
			}
		})
	}
	running.Wait()
	return errors.Join(errs...)
}

// crashAfter makes the call in which the plugin is killed.
func (o options) crashAfter(ctx context.Context, n network, v *victim) error {
	if err := addNetNS(ctx, v.container); err != nil {
		return err
	}
	if o.command == "del" {
		if err := must(n.call(ctx, "add", v.pod)); err != nil {
			return err
		}
	}
	log := filepath.Join("/run", v.container+".crash")
	dying := &environment{
		DefaultExec: invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: os.Stderr}},
		vars:        []string{fmt.Sprintf("%s=%d", crashAfterEnv, v.After), crashLogEnv + "=" + log},
	}
	call, err := network{libcni.NewCNIConfigWithCacheDir(pluginPath[:], cacheDir, dying), n.list}.call(ctx, o.command, v.pod)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(log)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if step, ok := strings.CutPrefix(lines[len(lines)-1], fmt.Sprintf("%d ", v.After)); ok {
		v.Step = step
	} else if call.Error != nil { // it has fewer steps, and was not killed
		return fmt.Errorf("%s: %w", o.command, call.Error)
	}
	return os.RemoveAll(log)
}

// An environment runs plugins with further variables.
type environment struct {
	invoke.DefaultExec
	vars []string
}

// ExecPlugin implements invoke.Exec.
func (e *environment) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	return e.DefaultExec.ExecPlugin(ctx, path, stdin, append(slices.Clone(environ), e.vars...))
}

// bringBack is what a runtime does some time after the crash. An error of the
// plugin is noted.
func (o options) bringBack(ctx context.Context, n network, victims []*victim) error {
	switch recovery := victims[0].Recovery; recovery {
	case "del":
	case "del-without-netns":
		if err := each(victims, func(v *victim) error { return delNetNS(ctx, v.container) }); err != nil {
			return err
		}
	case "del-without-journal":
		journals, err := filepath.Glob(filepath.Join(o.dataDir, "devices", "*.json"))
		for _, name := range journals {
			err = errors.Join(err, os.Remove(name))
		}
		if err != nil {
			return err
		}
	default:
		return fmt.Errorf("recover by %q: want del, gc, del-without-netns or del-without-journal", recovery)
	}
	return each(victims, func(v *victim) error {
		if err := must(n.call(ctx, "del", v.pod)); err != nil {
			v.Error = err.Error()
		}
		return nil
	})
}

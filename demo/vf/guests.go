// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/vf/report"
)

const (
	module = "github.com/smcr-io/kube-smcr"

	// dataDir is the default of all programs.
	dataDir = "/run/kube-smcr"

	// patience bounds what is waited for.
	patience = 30 * time.Second

	// pollEvery is the pause between two looks.
	pollEvery = 200 * time.Millisecond
)

// up starts guests with VFs, and builds what they run meanwhile.
func (d *demo) up(ctx context.Context, cfg lab.Config, vfs int) error {
	cfg.Name = fmt.Sprintf("demo-vf-%d", os.Getpid())
	var err error
	if d.lab, err = lab.Up(ctx, cfg); err != nil {
		return err
	}
	var g errgroup.Group
	g.Go(func() error { return build(ctx, d.lab) })
	for i := range d.lab.Guests() {
		g.Go(func() error {
			for pf := range cfg.PFs {
				if _, err := d.lab.Guest(i).MakeVFs(ctx, d.lab.Guest(i).PF(pf), vfs); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

func build(ctx context.Context, l *lab.Lab) error {
	if _, err := l.Build(ctx, module+"/test/vm/vf/driver", lab.BuildOptions{}); err != nil {
		return err
	}
	if err := l.BuildNode(ctx); err != nil {
		return err
	}
	_, err := l.BuildCNIPlugins(ctx)
	return err
}

// each does something on all nodes at the same time.
func (d *demo) each(do func(i int, g *lab.Guest) error) error {
	var running errgroup.Group
	for i := range d.lab.Guests() {
		g := d.lab.Guest(i)
		running.Go(func() error {
			if err := do(i, g); err != nil {
				return fmt.Errorf("%s: %w", g.Name(), err)
			}
			return nil
		})
	}
	return running.Wait()
}

// see runs a command on a node and shows it with its output.
func (d *demo) see(ctx context.Context, node int, command string) (string, error) {
	g := d.lab.Guest(node)
	out, err := g.Shell(ctx, command)
	if err != nil {
		return out, err
	}
	fmt.Fprintf(d.Out, "%s$ %s\n", g.Name(), command)
	if out != "" {
		fmt.Fprintln(d.Out, strings.TrimRight(out, "\n"))
	}
	fmt.Fprintln(d.Out)
	return out, nil
}

// eventually waits for a condition and notes it as a check.
func (d *demo) eventually(ctx context.Context, what string, condition func() (detail string, err error)) {
	began := time.Now()
	for {
		detail, err := condition()
		if err == nil {
			d.Check(what, true, "%s (after %.1f s)", detail, time.Since(began).Seconds())
			return
		}
		if ctx.Err() != nil || time.Since(began) > patience {
			d.Check(what, false, "%v", err)
			return
		}
		time.Sleep(pollEvery)
	}
}

// ask asks a node's agent.
func ask[T any](ctx context.Context, g *lab.Guest, question string) (answer T, err error) {
	return decode[T](g.Run(ctx, "smcrctl", "-o", "json", question))
}

// host is the state of a node that must be the same afterwards.
func host(ctx context.Context, g *lab.Guest) (report.Host, error) {
	return decode[report.Host](g.Run(ctx, "driver", "host", "-data-dir", dataDir+"/devices"))
}

// call makes a call of the plugin for the pod as Multus does: for one device.
func call(ctx context.Context, g *lab.Guest, ifName, device, command string) (report.Call, error) {
	c, err := decode[report.Call](g.Run(ctx, "driver", "call", "-conf", "/host/"+g.Name()+".conflist", "-container", pod, "-if", ifName, "-device", device, command))
	if err == nil && c.Error != nil {
		err = fmt.Errorf("%s of %s: %w", command, device, c.Error)
	}
	return c, err
}

func decode[T any](out string, err error) (T, error) {
	var v T
	if err == nil {
		err = json.Unmarshal([]byte(out), &v)
	}
	return v, err
}

// write writes a file that guests see as /host/NAME.
func (d *demo) write(name, text string) error {
	return os.WriteFile(filepath.Join(d.lab.Share(), name), []byte(text), 0o600)
}

// network writes the configuration of a network that guests see as
// /host/NAME.conflist.
func (d *demo) network(name, plugin string) error {
	return d.write(name+".conflist", `{"cniVersion": "1.1.0", "name": "roce", "plugins": [`+plugin+`]}`)
}

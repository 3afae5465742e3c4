// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/demo/transcript"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// pair is this machine and the guest with siw.
type pair struct {
	lab     *lab.Lab
	guest   *lab.Guest
	host    *lab.Host
	program string // of the guest
}

// showSIW runs one program in a guest, on siw, and the other one here: first the server, then the client.
func showSIW(ctx context.Context, t *transcript.Transcript, o options) (err error) {
	t.Title("A guest with Linux' siw, whose network this machine joins")
	p := &pair{}
	defer func() { err = errors.Join(err, p.close()) }()
	if err := p.up(ctx); err != nil {
		return err
	}
	t.Say("  siw's kernel opens the TCP connection itself, when rdma_cm asks for it: it upgrades none of a program's,")
	t.Say("  so nobody talks text here. The other program is on softiwarp, with an ordinary TCP socket.")
	for _, run := range []struct {
		title            string
		server, client   place
		serves, asks     string // kinds of ways
		serverIP, fromIP string
	}{
		{"The server is in the guest, on siw", p.there, p.here, kindSIW, kindDirect, p.guest.Addr(0).String(), p.host.Addr().String()},
		{"The client is in the guest, on siw", p.here, p.there, kindDirect, kindSIW, p.host.Addr().String(), p.guest.Addr(0).String()},
	} {
		t.Title("%s", run.title)
		server, err := startProgram(ctx, t, run.server, "server", run.serves, run.serverIP)
		if err != nil {
			return err
		}
		defer server.end()
		addr, err := server.follow()
		if err != nil {
			return err
		}
		file := filepath.Join(filepath.Dir(o.pcap), "server-"+run.serves+"-"+filepath.Base(o.pcap))
		w, err := watch(ctx, addr, file, "any", p.inside)
		if err != nil {
			return err
		}
		defer w.end()
		client, err := startProgram(ctx, t, run.client, "client", run.asks, run.fromIP, addr, fmt.Sprint(o.mebibytes))
		if err != nil {
			return err
		}
		defer client.end()
		if err := followBoth(client, server); err != nil {
			return err
		}
		t.Title("On the wire")
		if err := w.show(ctx, t); err != nil {
			return err
		}
	}
	return nil
}

// up starts the guest and builds its program.
func (p *pair) up(ctx context.Context) (err error) {
	if os.Getuid() != 0 {
		return errors.New("-siw takes root: this machine gets a NIC among the guests")
	}
	if p.lab, err = lab.Up(ctx, lab.Config{Guests: 1, NICs: 1, Name: fmt.Sprintf("demo-iwarp-%d", os.Getpid())}); err != nil {
		return err
	}
	p.guest = p.lab.Guest(0)
	if err := p.guest.AddSIW(ctx, 0); err != nil {
		return err
	}
	// As udev's usual rules have them.
	if _, err := p.guest.Shell(ctx, "chmod 0666 /dev/infiniband/rdma_cm /dev/infiniband/uverbs*"); err != nil {
		return err
	}
	if p.host, err = p.lab.Join(ctx); err != nil {
		return err
	}
	p.program, err = p.lab.Build(ctx, "github.com/smcr-io/kube-smcr/demo/upgrade", lab.BuildOptions{CGO: true})
	return err
}

func (p *pair) close() error {
	var errs []error
	if p.host != nil {
		errs = append(errs, p.host.Close())
	}
	if p.lab != nil {
		errs = append(errs, p.lab.Close())
	}
	return errors.Join(errs...)
}

// inside starts a process of this machine among the guests: what a thread starts is in its namespace.
func (p *pair) inside(cmd *exec.Cmd) error { return p.host.NetNS().Do(cmd.Start) }

// here is this machine, among the guests.
func (p *pair) here(ctx context.Context, role string, args []string) (running, io.Reader, io.Reader, error) {
	return startChild(ctx, role, args, p.inside)
}

// there is the guest.
func (p *pair) there(ctx context.Context, role string, args []string) (running, io.Reader, io.Reader, error) {
	c, err := p.guest.StartIn(ctx, "/", []string{roleVariable + "=" + role}, append([]string{p.program}, args...)...)
	if err != nil {
		return nil, nil, nil, err
	}
	return inGuest{c}, c.Stdout, c.Stderr, nil
}

// inGuest is a program in the guest.
type inGuest struct{ *lab.Process }

func (g inGuest) Kill() error { return g.Signal(unix.SIGKILL) }

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

const (
	// resetTimeout is how long an application may wait for the reset after
	// its agent was killed; the kernel sends it at once.
	resetTimeout = 5 * time.Second
	// directTimeout is the agent's default redirectTTL, 2 s, with room for a
	// busy machine: after it new connections go directly.
	directTimeout = 5 * time.Second
	// tryEvery is the pause between two tries to connect.
	tryEvery = 100 * time.Millisecond
)

// fallback talks to a server whose node's agent does not know it.
func (d *demo) fallback(ctx context.Context) error {
	get := func(what string) (usage, counters, error) {
		before, err := d.count(ctx)
		if err != nil {
			return usage{}, counters{}, err
		}
		o, err := d.curl(ctx, d.legacy.Addr4.String(), "small", d.bodies.small)
		if err != nil {
			return usage{}, counters{}, fmt.Errorf("%s connection: %w", what, err)
		}
		if o.wrong != "" {
			d.check(what+" connection to a server without SMC-R", false, "%s", o.wrong)
		}
		after, err := d.count(ctx)
		carried := counters{agents: [2]agentapi.ConnSums{{TotalTCP: after.agents[0].TotalTCP - before.agents[0].TotalTCP}}}
		return used(before, after), carried, err
	}
	u, carried, err := get("first")
	if err != nil {
		return err
	}
	d.check("the first connection falls back to TCP", u.conns == 1 && u.onSMCR == 0 && carried.agents[0].TotalTCP == 1,
		"%d connection, content right, %s by TCP, carried by the agent", u.conns, byteCount(u.byTCP))
	if u, carried, err = get("second"); err != nil {
		return err
	}
	d.check("the second one is not diverted", u.conns == 1 && u.onSMCR == 0 && carried.agents[0].TotalTCP == 0,
		"%d connection, the agent carried %d", u.conns, carried.agents[0].TotalTCP)
	src, dst := lab.PodNamespace+"/"+d.client.Name, fmt.Sprintf("%s:%d", d.legacy.Addr4, portHTTP)
	if d.report.Fallback, err = d.agents[0].API.Explain(ctx, src, dst); err != nil {
		return err
	}
	text, err := d.smcrctl(ctx, "explain", src, dst)
	if err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\nsmcrctl explain %s %s:\n%s\n", src, dst, text)
	e := d.report.Fallback
	d.check("smcrctl explain says why", e.Code == peerNoSMC && e.Bypassed != nil && strings.Contains(text, string(peerNoSMC)),
		"%s: %s", e.Code, e.Verdict)
	return nil
}

// peerNoSMC is the reason of a peer that did not answer the TCP option.
const peerNoSMC = agentapi.Code("PEERNOSMC")

// killAgent kills the client's agent while it carries a connection.
func (d *demo) killAgent(ctx context.Context) error {
	if err := d.settle(ctx); err != nil {
		return err
	}
	slow, err := d.client.Start(lab.Command{
		Args:   []string{"curl", "--silent", "--show-error", "--fail", fmt.Sprintf("http://%s:%d/slow/large", d.server.Addr4, portHTTP)},
		Stdout: io.Discard,
	})
	if err != nil {
		return err
	}
	wctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	err = d.agents[0].WaitStatus(wctx, "a slow transfer on SMC-R", func(s agentapi.Status) bool {
		return s.Conns.LiveSMCR == 1 && s.Conns.BytesSMCR > 0
	})
	if err != nil {
		return err
	}
	if err := d.agents[0].Kill(); err != nil {
		return err
	}
	d.agents[0] = nil
	died := time.Now()
	d.saidReset(ctx, slow)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}

	before, err := d.count(ctx) // waits until the server's agent let go, too
	if err != nil {
		return err
	}
	d.check("the server's agent ended its side", true, "%.1f s after the kill", time.Since(died).Seconds())
	tries, err := d.untilDirect(ctx, died)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		d.check("new connections work directly", false, "not within %v: %v", directTimeout, err)
		return nil
	}
	d.report.Killed.DirectAfter = time.Since(died).Seconds()
	after, err := d.count(ctx)
	if err != nil {
		return err
	}
	u := used(before, after)
	d.check("new connections work directly", u.atServer == 0 && u.byTCP >= uint64(d.bodies.small.bytes),
		"%.1f s after the kill (diversion lasts 2 s; %d refused before), content right, %s by TCP",
		d.report.Killed.DirectAfter, tries-1, byteCount(u.byTCP))
	return nil
}

// saidReset checks that an application whose agent was killed gets an error.
func (d *demo) saidReset(ctx context.Context, slow *lab.Proc) {
	ctx, cancel := context.WithTimeout(ctx, resetTimeout)
	defer cancel()
	began := time.Now()
	err := slow.Wait(ctx)
	said := "nothing: it believes that the transfer was complete"
	if err != nil {
		said = err.Error()
	}
	var ee *lab.ExitError
	if errors.As(err, &ee) {
		said = ee.Said
	}
	d.report.Killed.ApplicationSaid = said
	d.check("the carried connection was reset", strings.Contains(said, "reset by peer"),
		"ECONNRESET after %d ms; the application said: %s", time.Since(began).Milliseconds(), said)
}

// untilDirect tries until a connection works, and counts the tries.
func (d *demo) untilDirect(ctx context.Context, died time.Time) (int, error) {
	for tries := 1; ; tries++ {
		rctx, cancel := context.WithTimeout(ctx, directTimeout)
		o, err := d.curl(rctx, d.server.Addr4.String(), "small", d.bodies.small)
		cancel()
		if err == nil && o.wrong != "" {
			err = errors.New(o.wrong)
		}
		if err == nil {
			return tries, nil
		}
		if time.Since(died) > directTimeout {
			return tries, err
		}
		select {
		case <-time.After(tryEvery):
		case <-ctx.Done():
			return tries, context.Cause(ctx)
		}
	}
}

// restartAgent starts the agent again and talks over SMC-R.
func (d *demo) restartAgent(ctx context.Context) error {
	if err := d.startAgent(0); err != nil {
		return err
	}
	if err := d.waitAgent(ctx, 0); err != nil {
		return err
	}
	o, u, err := d.measure(ctx, app{"nginx + curl after the restart", func(ctx context.Context) (outcome, error) {
		return d.curl(ctx, d.server.Addr4.String(), "small", d.bodies.small)
	}})
	if err != nil {
		return err
	}
	d.judge("after the restart", o, u)
	return nil
}

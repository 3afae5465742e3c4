// SPDX-License-Identifier: Apache-2.0

package twonodes

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

// fallback talks to a server whose node's agent does not know it.
func (ap *Applications) fallback(ctx context.Context) error {
	get := func(what string) (usage, counters, error) {
		before, err := ap.count(ctx)
		if err != nil {
			return usage{}, counters{}, err
		}
		o, err := ap.curl(ctx, ap.legacy.Addr4.String(), "small", ap.bodies.small)
		if err != nil {
			return usage{}, counters{}, fmt.Errorf("%s connection: %w", what, err)
		}
		if o.wrong != "" {
			ap.check(what+" connection to a server without SMC-R", false, "%s", o.wrong)
		}
		after, err := ap.count(ctx)
		carried := counters{agents: [2]agentapi.ConnSums{{TotalTCP: after.agents[0].TotalTCP - before.agents[0].TotalTCP}}}
		return used(before, after), carried, err
	}
	u, carried, err := get("first")
	if err != nil {
		return err
	}
	// The agent asks the server by a connection that it resets at once.
	ap.check("the first connection falls back to TCP", u.conns == 2 && u.onSMCR == 0 && carried.agents[0].TotalTCP == 0,
		"%d connection after one of the agent's to ask, content right, %s by TCP, the agent carried %d",
		u.conns-1, byteCount(u.byTCP), carried.agents[0].TotalTCP)
	if u, carried, err = get("second"); err != nil {
		return err
	}
	ap.check("the second one is not asked for", u.conns == 1 && u.onSMCR == 0 && carried.agents[0].TotalTCP == 0,
		"%d connection, the agent carried %d", u.conns, carried.agents[0].TotalTCP)
	src, dst := lab.PodNamespace+"/"+ap.client.Name, fmt.Sprintf("%s:%d", ap.legacy.Addr4, portHTTP)
	if ap.findings.Fallback, err = ap.agents[0].API.Explain(ctx, src, dst); err != nil {
		return err
	}
	text, err := ap.smcrctl(ctx, "explain", src, dst)
	if err != nil {
		return err
	}
	ap.show("\nsmcrctl explain %s %s:\n%s\n", src, dst, text)
	e := ap.findings.Fallback
	ap.check("smcrctl explain says why", e.Code == peerNoSMC && e.Bypassed != nil && strings.Contains(text, string(peerNoSMC)),
		"%s: %s", e.Code, e.Verdict)
	return nil
}

// peerNoSMC is the reason of a peer that did not answer the TCP option.
const peerNoSMC = agentapi.Code("PEERNOSMC")

// killAgent kills the client's agent while it carries a connection.
func (ap *Applications) killAgent(ctx context.Context) error {
	if err := ap.quiesce(ctx); err != nil {
		return err
	}
	slow, err := ap.client.Start(lab.Command{
		Args:   []string{"curl", "--silent", "--show-error", "--fail", fmt.Sprintf("http://%s:%d/slow/large", ap.server.Addr4, portHTTP)},
		Stdout: io.Discard,
	})
	if err != nil {
		return err
	}
	wctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	err = ap.agents[0].WaitStatus(wctx, "a slow transfer on SMC-R", func(s agentapi.Status) bool {
		return s.Conns.LiveSMCR == 1 && s.Conns.BytesSMCR > 0
	})
	if err != nil {
		return err
	}
	if err := ap.agents[0].Kill(); err != nil {
		return err
	}
	ap.agents[0] = nil
	died := time.Now()
	ap.saidReset(ctx, slow)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}

	before, err := ap.count(ctx) // waits until the server's agent let go, too
	if err != nil {
		return err
	}
	ap.check("the server's agent ended its side", true, "%.1f s after the kill", time.Since(died).Seconds())
	tries, err := ap.untilDirect(ctx, died)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		ap.check("new connections work directly", false, "not within %v: %v", directTimeout, err)
		return nil
	}
	ap.findings.Killed.DirectAfter = time.Since(died).Seconds()
	after, err := ap.count(ctx)
	if err != nil {
		return err
	}
	u := used(before, after)
	ap.check("new connections work directly", tries == 1 && u.atServer == 0 && u.byTCP >= uint64(ap.bodies.small.bytes),
		"%.1f s after the kill, %d refused before, content right, %s by TCP", ap.findings.Killed.DirectAfter, tries-1, byteCount(u.byTCP))
	return nil
}

// saidReset checks that an application whose agent was killed gets an error.
func (ap *Applications) saidReset(ctx context.Context, slow *lab.Proc) {
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
	ap.findings.Killed.ApplicationSaid = said
	ap.check("the carried connection was reset", strings.Contains(said, "reset by peer"),
		"ECONNRESET after %d ms; the application said: %s", time.Since(began).Milliseconds(), said)
}

// untilDirect tries until a connection works, and counts the tries.
func (ap *Applications) untilDirect(ctx context.Context, died time.Time) (int, error) {
	for tries := 1; ; tries++ {
		rctx, cancel := context.WithTimeout(ctx, directTimeout)
		o, err := ap.curl(rctx, ap.server.Addr4.String(), "small", ap.bodies.small)
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
func (ap *Applications) restartAgent(ctx context.Context) error {
	if err := ap.startAgent(0); err != nil {
		return err
	}
	if err := ap.waitAgent(ctx, 0); err != nil {
		return err
	}
	o, u, err := ap.measure(ctx, app{"nginx + curl after the restart", func(ctx context.Context) (outcome, error) {
		return ap.curl(ctx, ap.server.Addr4.String(), "small", ap.bodies.small)
	}})
	if err != nil {
		return err
	}
	ap.judge("after the restart", o, u)
	return nil
}

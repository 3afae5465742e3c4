// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// # Handover
//
//	successor                         agent
//	opens its devices, on the
//	same addresses, and all that
//	can fail
//	POST /v1/handover ------------->  the manager stops: nothing is started,
//	                                  renewed or swept any more
//	                                  each diversion to its listeners is
//	                                  renewed once, for handoverHold
//	                                  closes its API and metrics, gives up
//	                                  the claim
//	<-------------------------- 204
//	takes claim, socket, port
//	each pod: listens, replaces
//	the table in one transaction
//	                                  stands by: carries what it carried,
//	                                  accepts what is still diverted to it
//	                                  SIGTERM: the connections may end until
//	                                  DrainTimeout
//
// At every moment somebody listens where a pod's table diverts to. If the
// successor dies, the agent that stands by finds the claim free for
// successorPatience and manages the node again, which is before the diversions
// to its listeners expire; pods whose table the successor had replaced are
// direct meanwhile, after RedirectTTL.

// handover is a request that waits for the manager.
type handover struct {
	done chan error // gets the answer, once
}

// apiHandover gives the node to another agent.
func (a *agent) apiHandover(w http.ResponseWriter, req *http.Request) {
	by := req.URL.Query().Get("instance")
	switch {
	case !a.node.Load().Takeover:
		problem(w, http.StatusForbidden, errors.New("node.takeover is false: set it for both agents, or stop this one first"))
		return
	case by != "" && by == a.tookFrom:
		problem(w, http.StatusConflict, fmt.Errorf("%s handed over to this agent, and does not get the node back while this one runs", by))
		return
	case a.draining.Load():
		problem(w, http.StatusServiceUnavailable, errStopping)
		return
	}
	h := &handover{done: make(chan error, 1)}
	err := a.manager.ask(req.Context(), h)
	if err == nil {
		err = <-h.done
	}
	if err != nil {
		problem(w, http.StatusServiceUnavailable, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// handOver is the agent's side, after its manager stopped.
func (a *agent) handOver(h *handover, api *apiServer) {
	a.manages(false)
	a.legacies.closeDoors(time.Now()) // of an earlier handover: a port has two listeners at most
	for key, p := range a.manager.snapshot() {
		if p.run != nil {
			a.legacies.add(p.run, time.Now())
		} else {
			rest := *p
			a.manager.withdraw(&rest)
		}
		a.manager.put(key, nil)
	}
	err := errors.Join(a.wire.release(), api.retire(), a.claim.release())
	a.claim = nil
	if err != nil {
		// The successor finds out what of it matters.
		a.cfg.Log.Warn("not everything was given up for the successor", "err", err)
	}
	a.cfg.Log.Info("node handed over; carrying on what is carried", "conns", len(a.flows.list(nil)))
	h.done <- nil
}

// manages tells those who do more for the node whether the agent manages it.
func (a *agent) manages(yes bool) {
	if a.cfg.Manages != nil {
		a.cfg.Manages(yes)
	}
}

// obtain takes the claim: from the agent that has it, if both allow it, or
// when an agent that just ends gives it back.
func (a *agent) obtain(ctx context.Context) (err error) {
	n := a.node.Load()
	deadline := time.Now().Add(claimPatience)
	for {
		if n.Takeover {
			if err := a.takeOver(ctx); err != nil {
				return err
			}
		}
		a.claim, err = tryClaim(n.APISocket)
		switch {
		case !errors.Is(err, errClaimed):
			return err
		case answers(ctx, n.APISocket):
			if !n.Takeover {
				return answersError(n.APISocket)
			}
			deadline = time.Now().Add(claimPatience) // somebody was faster
		case time.Now().After(deadline):
			return err
		}
		if !wait(ctx, claimPoll) {
			return err
		}
	}
}

// takeOver gets the node from the agent that has it, if there is one. The own
// devices are open already.
func (a *agent) takeOver(ctx context.Context) error {
	c := agentapi.NewClient(a.node.Load().APISocket)
	defer c.Close()
	deadline := time.Now().Add(takeoverPatience)
	for waiting := false; ; waiting = true {
		s, err := c.Status(ctx)
		if err == nil {
			err = c.Handover(ctx, a.cfg.Instance)
		}
		var refused *agentapi.RefusedError
		switch {
		case err == nil:
			a.tookFrom = s.Instance
			a.cfg.Log.Info("taking the node over", "from", s.Instance, "version", s.Version, "started", s.Started)
			return nil
		case errors.Is(err, agentapi.ErrNotRunning):
			return nil
		case errors.As(err, &refused) && refused.HTTPStatus != http.StatusServiceUnavailable:
			return fmt.Errorf("take the node over: %w", err)
		case refused == nil && time.Now().After(deadline):
			// One that hangs; one that ends meanwhile was asked again.
			return fmt.Errorf("take the node over: %w", err)
		case refused != nil && !waiting:
			a.cfg.Log.Info("waiting for another agent that is ending", "agent", s.Instance)
		}
		if !wait(ctx, claimPoll) {
			return fmt.Errorf("take the node over: %w", err)
		}
	}
}

// standBy is the life of an agent that handed over. It returns the servers of
// an agent that manages the node again, or nil when the agent is to end.
func (a *agent) standBy(ctx context.Context) (*apiServer, error) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	var (
		alone time.Time // since then nobody has the claim; zero: somebody has
		heir  = a.watchSuccessor()
	)
	defer heir.close()
	for {
		select {
		case <-ctx.Done():
			a.awaitSuccessor(ctx, heir)
			a.cfg.Log.Info("draining", "conns", len(a.flows.list(nil)), "timeout", a.node.Load().DrainTimeout)
			return nil, a.drainFor(ctx, a.legacies.take(), a.node.Load().DrainTimeout, nil)
		case <-a.cfg.Leave:
			return nil, a.leaveStandingBy(ctx)
		case <-a.cfg.Reload:
			a.reload()
			a.legacies.judge()
		case now := <-tick.C:
			if heir.served(ctx, now) {
				a.legacies.closeDoors(now)
			}
			a.legacies.tidy(now)
			c, err := tryClaim(a.node.Load().APISocket)
			switch {
			case err != nil:
				alone = time.Time{}
			case alone.IsZero():
				alone = now
				fallthrough
			case now.Sub(alone) < successorPatience:
				a.noteRelease(c.release())
			default:
				if api := a.resume(ctx, c); api != nil {
					return api, nil
				}
				alone = time.Time{}
			}
		}
	}
}

func (a *agent) noteRelease(err error) {
	if err != nil {
		a.cfg.Log.Warn("claim not given back", "err", err)
	}
}

// resume makes the agent manage the node again.
func (a *agent) resume(ctx context.Context, c *claim) *apiServer {
	a.cfg.Log.Warn("no successor for a while: managing the node again", "waited", successorPatience)
	api, err := a.listenAPI(ctx)
	if err != nil {
		a.cfg.Log.Error("cannot manage the node again; trying on", "err", err)
		a.noteRelease(c.release())
		return nil
	}
	a.claim, a.tookFrom = c, ""
	a.manager.restart()
	return api
}

// awaitSuccessor waits until nothing is diverted to the listeners of this
// agent any more: the successor serves the pods, or the diversions expired.
func (a *agent) awaitSuccessor(ctx context.Context, heir *successor) {
	ctx, cancel := a.hurried(context.WithoutCancel(ctx), time.Until(a.legacies.heldUntil()))
	defer cancel()
	for !heir.served(ctx, time.Now()) && wait(ctx, pollEvery/10) {
	}
}

// successor is what an agent that stands by knows of its successor.
type successor struct {
	client *agentapi.Client
	synced time.Time // zero: not seen to be synced yet
}

func (a *agent) watchSuccessor() *successor {
	return &successor{client: agentapi.NewClient(a.node.Load().APISocket)}
}

func (s *successor) close() { s.client.Close() }

// served tells whether the successor has looked at all pods for long enough:
// what was diverted just before has come then, even if a packet of its
// handshake was lost once.
func (s *successor) served(ctx context.Context, now time.Time) bool {
	if s.synced.IsZero() {
		ctx, cancel := context.WithTimeout(ctx, pollEvery)
		defer cancel()
		if st, err := s.client.Status(ctx); err != nil || !st.Synced {
			return false
		}
		s.synced = now
	}
	return now.Sub(s.synced) >= doorLinger
}

// hurried is a context that ends after a time, or when the agent is told to
// hurry.
func (a *agent) hurried(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, d)
	over := make(chan struct{})
	go func() {
		select {
		case <-a.cfg.Hurry:
			cancel()
		case <-ctx.Done():
		}
		close(over)
	}()
	return ctx, func() {
		cancel()
		<-over
	}
}

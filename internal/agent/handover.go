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
//	same addresses, and does
//	all else that can fail
//	POST /v1/handover ------------->  the manager stops: from now on the agent
//	                                  starts, renews and sweeps nothing
//	                                  renews each diversion to its listeners
//	                                  once, for handoverTTL
//	                                  closes its API and metrics, gives up
//	                                  the node's lock
//	<-------------------------- 204
//	takes lock, socket, port
//	for each pod: listens, and
//	replaces the table in one
//	transaction
//	                                  stands by: carries its sessions, accepts
//	                                  what is still diverted to it
//	                                  SIGTERM: its sessions may end until
//	                                  DrainTimeout
//
// At every moment somebody listens where a pod's table diverts to. If the
// successor dies, for example 2 s after the handover:
//
//	 0 s  the agent hands over; its diversions hold until 10 s (handoverTTL)
//	 2 s  the successor dies; the kernel gives the node's lock back
//	 3 s  the agent finds the lock free for the first time (pollEvery)
//	 8 s  the lock was free for successorPatience: the agent manages the node
//	      again, and sets the pods up anew
//
// Pods whose table the successor had already replaced are direct from RedirectTTL
// after its death until then.
//
// An agent that was told to end before a successor came hands over, too. Its tables divert nothing
// any more, so there is nothing to hold for the successor:
//
//	successor                         agent
//	                                  SIGTERM: new connections go directly,
//	                                  its sessions may end until DrainTimeout
//	POST /v1/handover ------------->  closes its API and metrics, gives up
//	                                  the node's lock, and changes nothing
//	                                  more in the pods that it still serves
//	<-------------------------- 204
//	takes lock, socket, port, and
//	replaces the tables
//	                                  ends with its last session

// handover is a request to the manager to hand over.
type handover struct {
	done chan error // gets the result, once
}

// apiHandover serves the request of a successor.
func (a *agent) apiHandover(w http.ResponseWriter, req *http.Request) {
	by := req.URL.Query().Get("instance")
	switch {
	case !a.node.Load().Takeover:
		problem(w, http.StatusForbidden, errors.New("node.takeover is false: set it for both agents, or stop this one first"))
		return
	case by != "" && by == a.tookFrom:
		problem(w, http.StatusConflict, fmt.Errorf("%s handed over to this agent, and does not get the node back while this one runs", by))
		return
	case a.left():
		problem(w, http.StatusServiceUnavailable, errStopping)
		return
	}
	h := &handover{done: make(chan error, 1)}
	err := a.manager.requestHandover(req.Context(), h)
	if err == nil {
		err = <-h.done
	}
	if err != nil {
		problem(w, http.StatusServiceUnavailable, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// handOver gives the node up, after the manager stopped.
func (a *agent) handOver(h *handover, api *apiServer) {
	a.manages(false)
	a.legacies.closeListeners(time.Now()) // those of an earlier handover: one port has two listeners at most
	for key, p := range a.manager.snapshot() {
		if p.proxy != nil {
			a.legacies.add(p.proxy, time.Now())
		} else {
			rest := *p
			a.manager.parkKernel(&rest)
			a.manager.releaseDevices(&rest)
		}
		a.manager.put(key, nil)
	}
	a.giveUpNode(h, api)
}

// giveUpNode lets the successor have what belongs to the agent that manages the node, when the pods
// are released.
func (a *agent) giveUpNode(h *handover, api *apiServer) {
	err := errors.Join(a.kernelPath.close(), a.wire.handOver(), api.retire(), a.nodeLock.release())
	a.nodeLock = nil
	if err != nil {
		// If it matters, the successor fails, and says why.
		a.cfg.Log.Warn("not everything was given up for the successor", "err", err)
	}
	a.cfg.Log.Info("node handed over; carrying on what is carried", "conns", a.sessions.count(nil))
	h.done <- nil
}

// manages tells Config.Manages whether the agent manages the node.
func (a *agent) manages(yes bool) {
	if a.cfg.Manages != nil {
		a.cfg.Manages(yes)
	}
}

// lockNode takes the node's lock. If another agent holds the lock, lockNode takes the node over
// from it, where both allow that, or waits a moment for an agent that is about to end.
func (a *agent) lockNode(ctx context.Context) (err error) {
	n := a.node.Load()
	deadline := time.Now().Add(nodeLockPatience)
	for {
		if n.Takeover {
			if err := a.takeOver(ctx); err != nil {
				return err
			}
		}
		a.nodeLock, err = tryLockNode(n.APISocket)
		switch {
		case !errors.Is(err, errNodeLocked):
			return err
		case socketAnswers(ctx, n.APISocket):
			if !n.Takeover {
				return answersError(n.APISocket)
			}
			deadline = time.Now().Add(nodeLockPatience) // another successor was faster: ask that one
		case time.Now().After(deadline):
			return err
		}
		if !sleep(ctx, nodeLockPoll) {
			return err
		}
	}
}

// takeOver asks the agent that manages the node, if there is one, to hand over. This agent's
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
			// The agent hangs. (An agent that is ending answers 503 and is asked again.)
			return fmt.Errorf("take the node over: %w", err)
		case refused != nil && !waiting:
			a.cfg.Log.Info("waiting for another agent that is ending", "agent", s.Instance)
		}
		if !sleep(ctx, nodeLockPoll) {
			return fmt.Errorf("take the node over: %w", err)
		}
	}
}

// standBy carries the sessions of an agent that handed over. It returns the API's servers if the
// agent manages the node again, or nil if the agent is to end.
func (a *agent) standBy(ctx context.Context) (*apiServer, error) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	var (
		alone time.Time // since when nobody holds the node's lock; zero: somebody does
		succ  = a.watchSuccessor()
	)
	defer succ.close()
	for {
		select {
		case <-ctx.Done():
			a.awaitSuccessor(ctx, succ)
			a.cfg.Log.Info("draining", "conns", a.sessions.count(nil), "timeout", a.node.Load().DrainTimeout)
			err := a.drainFor(ctx, a.legacies.take(), a.node.Load().DrainTimeout, nil)
			return nil, errors.Join(err, a.wire.endStandby(succ.wire(ctx)))
		case <-a.cfg.Leave:
			return nil, a.leaveStandingBy(ctx)
		case <-a.cfg.Reload:
			a.reload()
			a.legacies.enforcePolicies()
		case now := <-tick.C:
			if succ.served(ctx, now, a.legacies.divertedUntil()) {
				a.legacies.closeListeners(now)
			}
			a.legacies.stopFinished(now)
			l, err := tryLockNode(a.node.Load().APISocket)
			switch {
			case err != nil:
				alone = time.Time{}
			case alone.IsZero():
				alone = now
				fallthrough
			case now.Sub(alone) < successorPatience:
				a.logUnlock(l.release())
			default:
				if api := a.resume(ctx, l); api != nil {
					return api, nil
				}
				alone = time.Time{}
			}
		}
	}
}

func (a *agent) logUnlock(err error) {
	if err != nil {
		a.cfg.Log.Warn("lock of the node not given back", "err", err)
	}
}

// resume makes the agent manage the node again, with the lock l.
func (a *agent) resume(ctx context.Context, l *nodeLock) *apiServer {
	a.cfg.Log.Warn("no successor for a while: managing the node again", "waited", successorPatience)
	api, err := a.listenAPI(ctx)
	if err != nil {
		a.cfg.Log.Error("cannot manage the node again; trying on", "err", err)
		a.logUnlock(l.release())
		return nil
	}
	a.nodeLock, a.tookFrom = l, ""
	a.manager.restart()
	return api
}

// awaitSuccessor waits until nothing is diverted to this agent's listeners any more: the successor
// serves the pods, or the diversions expired.
func (a *agent) awaitSuccessor(ctx context.Context, succ *successor) {
	ctx, cancel := a.hurried(context.WithoutCancel(ctx), time.Until(a.legacies.divertedUntil()))
	defer cancel()
	for !succ.served(ctx, time.Now(), a.legacies.divertedUntil()) && sleep(ctx, pollEvery/10) {
	}
}

// successor is what an agent that stands by knows of its successor.
type successor struct {
	client *agentapi.Client
	synced time.Time // when first it was and had no failed pods, or the diversions had expired; zero: not yet
}

func (a *agent) watchSuccessor() *successor {
	return &successor{client: agentapi.NewClient(a.node.Load().APISocket)}
}

func (s *successor) close() { s.client.Close() }

// served reports whether the successor serves all pods, and has for listenerLinger. Connections
// that were diverted here just before have arrived by then, even if a packet of their handshake was
// lost once. A pod that the successor could not set up is diverted here until the time until.
func (s *successor) served(ctx context.Context, now, until time.Time) bool {
	if s.synced.IsZero() {
		ctx, cancel := context.WithTimeout(ctx, pollEvery)
		defer cancel()
		if st, err := s.client.Status(ctx); err != nil || !st.Synced || st.Pods.Failed > 0 && !now.After(until) {
			return false
		}
		s.synced = now
	}
	return now.Sub(s.synced) >= listenerLinger
}

// wire is the state of the successor's filter of RoCE packets: WireNone if there is no successor,
// or it has no filter.
func (s *successor) wire(ctx context.Context) agentapi.WireState {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pollEvery)
	defer cancel()
	st, err := s.client.Status(ctx)
	if err != nil {
		return agentapi.WireNone
	}
	return st.Wire.State
}

// hurried returns a context that ends after a time, or when Config.Hurry is closed.
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

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/sdpload"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

// openSDP opens both stacks of this worker, on one device.
func (w *workload) openSDP() error {
	w.sdp = make(map[bool]*sdp.Stack)
	for _, noCRC := range []bool{false, true} {
		s, err := sdp.NewStack(sdpload.Config(w.iwarp, noCRC))
		if err != nil {
			return err
		}
		w.opened.Add(s.Close)
		w.sdp[noCRC] = s
	}
	return nil
}

// serveSDP answers until the worker ends. Clients say whether there are CRCs.
func (w *workload) serveSDP(ctx context.Context, addr string) error {
	l, err := sdp.Listen(ctx, w.sdp[true], "tcp", addr)
	if err != nil {
		return err
	}
	w.opened.Add(l.Close)
	go sdpload.Serve(w.sdp[true], l)
	return nil
}

// loadSDP makes a load on a connection of its own.
func (w *workload) loadSDP(ctx context.Context, req request) (load.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	s := w.sdp[req.SDP.NoCRC]
	c, _, err := (&sdp.Dialer{Stack: s}).Dial(ctx, req.Addr)
	if err != nil {
		return load.Result{}, err
	}
	return sdpload.Load(s, c.(*sdp.Conn), req.Load, req.SDP.Way)
}

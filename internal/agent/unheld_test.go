// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// endingHolder is a holder whose queue breaks, or that serves its queue until it is told to end.
type endingHolder struct {
	holder
	err error
}

func (h endingHolder) Run(ctx context.Context) error {
	if h.err == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	return h.err
}

func (endingHolder) Counters() linux.HolderCounters { return linux.HolderCounters{} }

// TestHold_unheld: that the SYNs of a pod are not held, or not any more, stands with its attachment and
// among the node's problems, with the cause.
func TestHold_unheld(t *testing.T) {
	for _, tt := range []struct {
		name   string
		before func(t *testing.T, px *proxy)
		want   string // "": nothing
	}{
		{
			"the queue cannot be bound", func(t *testing.T, px *proxy) { must(t, px.openHold()) },
			"SYNs not held: connect() of the pod's programs succeeds before their destination answers: no queues",
		},
		{"the queue breaks", func(_ *testing.T, px *proxy) {
			h := &hold{px: px, holder: endingHolder{err: errors.New("message too long")}, ended: make(chan struct{})}
			h.start()
			<-h.ended
			h.stop()
		}, "SYNs not held any more: the pod's new connections go directly: message too long"},
		{"the queue is closed", func(_ *testing.T, px *proxy) {
			h := &hold{px: px, holder: endingHolder{}, ended: make(chan struct{})}
			h.start()
			h.stop()
			<-h.ended
		}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBare(t, newBench(t, "", preferAll))
			b.openDevices()
			b.a.holds.on = true
			px := b.proxy("a").px
			b.manage(px, nil)
			tt.before(t, px)
			v := View{b.a}
			if got := v.Attachments().Attachments[0].Detail; got != tt.want {
				t.Errorf("detail %q, want %q", got, tt.want)
			}
			if got := strings.Join(v.Status().Problems, "\n"); strings.Contains(got, "SYNs are not held") != (tt.want != "") {
				t.Errorf("problems %q", got)
			}
		})
	}
}

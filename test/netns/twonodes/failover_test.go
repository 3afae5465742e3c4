// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

func TestLinks(t *testing.T) {
	groups := []agentapi.LinkGroup{
		{ID: 3, State: "ACTIVE", Links: []agentapi.Link{
			{ID: 1, Device: "soft0", State: "ACTIVE", LocalGID: "::ffff:192.168.89.1"},
			{ID: 2, Device: "soft1", State: "FORMING", LocalGID: "::ffff:192.168.90.1"},
		}},
		{ID: 4, State: "ACTIVE", Links: []agentapi.Link{
			{ID: 1, Device: "soft0", State: "ACTIVE"}, {ID: 2, Device: "soft1", State: "ACTIVE"}, {ID: 3, Device: "soft1", State: "ACTIVE"},
		}},
		{ID: 5, State: "DEAD"},
	}
	for id, want := range map[uint32]int{3: 1, 4: 2, 5: 0, 6: 0} {
		if got := activeLinks(groups, id); got != want {
			t.Errorf("group %d has active links on %d devices, want %d", id, got, want)
		}
	}
	if addr, ok := deviceOf(groups, 3, 2); addr != "192.168.90.1" || !ok {
		t.Errorf("link 2 of group 3: %s, %t", addr, ok)
	}
	if addr, ok := deviceOf(groups, 3, 3); ok {
		t.Errorf("link 3 of group 3: %s", addr)
	}
	const want = "group 3: link 1 soft0 ACTIVE; link 2 soft1 FORMING | group 5: no link"
	if got := describeLinks([]agentapi.LinkGroup{groups[0], groups[2]}); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestLoad_loop(t *testing.T) {
	wrong := errors.New("wrong")
	t.Run("finishes what it began", func(t *testing.T) {
		l := &load{stop: make(chan struct{})}
		began, end := make(chan struct{}), make(chan struct{})
		var r LoadResult
		var runs atomic.Int32
		l.loop(t.Context(), &r, func(context.Context) error {
			runs.Add(1)
			close(began)
			<-end
			return wrong
		})
		<-began
		go func() {
			<-l.stop
			close(end)
		}()
		l.finish()
		if runs.Load() != 1 || r.Runs != 1 || r.Failed != 1 || r.Errors[0] != "wrong" {
			t.Errorf("%d runs, %+v", runs.Load(), r)
		}
	})
	t.Run("an interrupted run does not count", func(t *testing.T) {
		l := &load{stop: make(chan struct{})}
		ctx, cancel := context.WithCancel(t.Context())
		var r LoadResult
		l.loop(ctx, &r, func(ctx context.Context) error {
			cancel()
			return ctx.Err()
		})
		l.finish()
		if r.Runs != 0 || r.Failed != 0 {
			t.Errorf("%+v", r)
		}
	})
}

func TestWatch(t *testing.T) {
	c, s := pipe(t)
	go func() { // answers nothing
		_, _ = s.Read(make([]byte, 1))
		<-time.After(20 * time.Millisecond)
		_ = s.Close()
	}()
	p := startProbe(c, time.Now())
	defer p.close()
	f := &Failover{probes: []*probe{p}}
	stall, died, err := f.watch(t.Context(), p.now(), time.Hour)
	if err != nil || died == nil || stall < 20*time.Millisecond {
		t.Errorf("stall %v, died %v, %v", stall, died, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := f.watch(ctx, p.now(), 0); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
}

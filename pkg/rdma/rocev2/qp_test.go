// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"errors"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func TestQP_transitions(t *testing.T) {
	states := []rdma.QPState{rdma.QPReset, rdma.QPInit, rdma.QPRTR, rdma.QPRTS, rdma.QPError}
	allowed := map[[2]rdma.QPState]bool{
		{rdma.QPReset, rdma.QPInit}: true,
		{rdma.QPInit, rdma.QPInit}:  true,
		{rdma.QPInit, rdma.QPRTR}:   true,
		{rdma.QPRTR, rdma.QPRTS}:    true,
	}
	for _, s := range states {
		allowed[[2]rdma.QPState{s, rdma.QPReset}] = true
		if s != rdma.QPReset {
			allowed[[2]rdma.QPState{s, rdma.QPError}] = true
		}
	}
	for i, from := range states {
		for _, to := range states {
			q, err := NewQP(QPConfig{Num: 1, MaxSendWR: 1, MaxRecvWR: 1, Memory: &testMemory{}})
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range states[:i+1] {
				if err := q.Modify(time.Time{}, rdma.QPAttr{State: s, MTU: rdma.MTU1024}); err != nil {
					t.Fatal(err)
				}
			}
			err = q.Modify(time.Time{}, rdma.QPAttr{State: to, MTU: rdma.MTU1024})
			want := allowed[[2]rdma.QPState{from, to}]
			if (err == nil) != want || err != nil && !errors.Is(err, rdma.ErrState) {
				t.Errorf("%v to %v: %v", from, to, err)
			}
			if err != nil && q.State() != from {
				t.Errorf("refused transition %v to %v left state %v", from, to, q.State())
			}
		}
	}
}

func TestQP_badAttributes(t *testing.T) {
	tests := []struct {
		name string
		a    rdma.QPAttr
	}{
		{"MTU", rdma.QPAttr{State: rdma.QPRTR, MTU: 6}},
		{"destination", rdma.QPAttr{State: rdma.QPRTR, MTU: 3, DestQPN: 1 << 24}},
		{"receive PSN", rdma.QPAttr{State: rdma.QPRTR, MTU: 3, RQPSN: 1 << 24}},
		{"RNR timer", rdma.QPAttr{State: rdma.QPRTR, MTU: 3, MinRNRTimer: 32}},
		{"send PSN", rdma.QPAttr{State: rdma.QPRTS, SQPSN: 1 << 24}},
		{"timeout", rdma.QPAttr{State: rdma.QPRTS, Timeout: 32}},
		{"retries", rdma.QPAttr{State: rdma.QPRTS, RetryCount: 8}},
		{"RNR retries", rdma.QPAttr{State: rdma.QPRTS, RNRRetry: 8}},
		{"READs served", rdma.QPAttr{State: rdma.QPRTR, MTU: rdma.MTU1024, ReadsServed: MaxReads + 1}},
		{"READs asked", rdma.QPAttr{State: rdma.QPRTS, ReadsAsked: MaxReads + 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			q, err := NewQP(QPConfig{Num: 1, MaxSendWR: 1, MaxRecvWR: 1, Memory: &testMemory{}})
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range []rdma.QPState{rdma.QPInit, rdma.QPRTR, rdma.QPRTS} {
				a := rdma.QPAttr{State: s, MTU: rdma.MTU1024}
				if s == tt.a.State {
					a = tt.a
				}
				if err := q.Modify(time.Time{}, a); s == tt.a.State {
					if !errors.Is(err, rdma.ErrInvalid) {
						t.Errorf("got %v", err)
					}
					return
				} else if err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

func TestQP_badConfig(t *testing.T) {
	good := QPConfig{Num: 1, MaxSendWR: 1, MaxRecvWR: 1, Memory: &testMemory{}}
	tests := []struct {
		name string
		edit func(*QPConfig)
	}{
		{"number", func(c *QPConfig) { c.Num = 1 << 24 }},
		{"no send queue", func(c *QPConfig) { c.MaxSendWR = 0 }},
		{"receive queue", func(c *QPConfig) { c.MaxRecvWR = MaxQueue + 1 }},
		{"SGEs", func(c *QPConfig) { c.MaxSGE = MaxSGE + 1 }},
		{"inline", func(c *QPConfig) { c.MaxInline = -1 }},
		{"window", func(c *QPConfig) { c.Window = MaxWindow + 1 }},
		{"memory", func(c *QPConfig) { c.Memory = nil }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := good
			tt.edit(&c)
			if _, err := NewQP(c); !errors.Is(err, rdma.ErrInvalid) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestQP_flushes(t *testing.T) {
	b := newBench(t, nil)
	b.recv(8, 8)
	b.send(b.wr(1, rdma.OpSend, 1), b.wr(2, rdma.OpRead, 1))
	b.out()
	if err := b.q.Modify(b.now, rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatal(err)
	}
	b.wantWC("1 SEND work request flushed", "2 RDMA_READ work request flushed",
		"100 RECV work request flushed", "101 RECV work request flushed")
	b.recv(8)
	b.send(b.wr(3, rdma.OpSend, 1))
	b.wantWC("100 RECV work request flushed", "3 SEND work request flushed")
	b.in(Acknowledge, 0, ackPacket)
	b.in(SendOnly, 0, data(1, 'x'))
	b.wantWC()
	b.wantOut("Acknowledge 0 [NAK remote operational error msn 0]")
	if _, ok := b.q.PollEvent(); ok {
		t.Error("event for an ordered error")
	}
}

func TestQP_resetForgets(t *testing.T) {
	b := newBench(t, nil)
	b.recv(8)
	b.send(b.wr(1, rdma.OpSend, 1))
	b.out()
	if err := b.q.Modify(b.now, rdma.QPAttr{State: rdma.QPReset}); err != nil {
		t.Fatal(err)
	}
	b.wantWC()
	if _, ok := b.q.NextTimeout(); ok {
		t.Error("timer runs")
	}
	if _, err := b.q.PostRecv([]rdma.RecvWR{{}}); !errors.Is(err, rdma.ErrState) {
		t.Errorf("PostRecv in RESET: %v", err)
	}
	if _, err := b.q.PostSend(b.now, []rdma.SendWR{{}}); !errors.Is(err, rdma.ErrState) {
		t.Errorf("PostSend in RESET: %v", err)
	}
}

// TestQP_polledCompletionsFreeSlots: a queue slot is taken until its
// completion was polled.
func TestQP_polledCompletionsFreeSlots(t *testing.T) {
	b := newBench(t, func(c *QPConfig, _ *rdma.QPAttr) { c.MaxSendWR = 2 })
	b.send(b.wr(1, rdma.OpSend, 1), b.wr(2, rdma.OpSend, 1))
	b.out()
	b.in(Acknowledge, 1, ackPacket)
	if _, err := b.q.PostSend(b.now, []rdma.SendWR{{}}); !errors.Is(err, rdma.ErrQueueFull) {
		t.Errorf("PostSend = %v", err)
	}
	b.wantWC("1 SEND success 1", "2 SEND success 1")
	b.send(b.wr(3, rdma.OpSend, 1))
}

// TestQP_outsideRTS: what arrives before its time is dropped.
func TestQP_outsideRTS(t *testing.T) {
	q, err := NewQP(QPConfig{Num: 1, MaxSendWR: 1, MaxRecvWR: 1, Memory: &testMemory{}})
	if err != nil {
		t.Fatal(err)
	}
	ops := func() {
		for op := range numOpCodes {
			q.HandlePacket(time.Time{}, &Packet{BTH: BTH{OpCode: OpCode(op)}})
		}
	}
	ops()
	if err := q.Modify(time.Time{}, rdma.QPAttr{State: rdma.QPInit}); err != nil {
		t.Fatal(err)
	}
	ops()
	var tx [1]TxPacket
	if n := q.PollTx(time.Time{}, tx[:]); n != 0 || q.State() != rdma.QPInit {
		t.Errorf("answered in %v", q.State())
	}
}

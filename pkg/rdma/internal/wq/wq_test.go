// SPDX-License-Identifier: Apache-2.0

package wq

import (
	"errors"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func TestRingSize(t *testing.T) {
	for n, want := range map[int]int{1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 64: 64, 65: 128} {
		if got := RingSize(n); got != want {
			t.Errorf("%d: %d places, want %d", n, got, want)
		}
	}
}

func TestCompletions_keepOrderAndCount(t *testing.T) {
	r := NewCompletions(2, 3)
	var next, polled uint64
	dst := make([]Completion, 2)
	for range 100 {
		for r.Sends()+r.Recvs() < 5 {
			r.Push(Completion{WC: rdma.WC{ID: next}, Send: next%3 == 0})
			next++
		}
		n := r.Poll(dst)
		if n != 2 {
			t.Fatalf("polled %d of 5", n)
		}
		for _, c := range dst[:n] {
			if c.WC.ID != polled || c.Send != (polled%3 == 0) {
				t.Fatalf("completion %+v, want ID %d", c, polled)
			}
			polled++
		}
		sends := 0
		for id := polled; id < next; id++ {
			if id%3 == 0 {
				sends++
			}
		}
		if r.Sends() != sends || r.Recvs() != int(next-polled)-sends {
			t.Fatalf("%d sends and %d receives wait, want %d and %d", r.Sends(), r.Recvs(), sends, int(next-polled)-sends)
		}
	}
	r.Clear()
	if n := r.Poll(dst); n != 0 || r.Sends() != 0 || r.Recvs() != 0 {
		t.Errorf("%d completions after Clear", n)
	}
}

func TestEvents_keepTheLast(t *testing.T) {
	var r Events
	for i := range maxEvents + 2 {
		r.Push(rdma.AsyncEvent{QPN: rdma.QPN(i)})
	}
	for i := range maxEvents {
		if e, ok := r.Pop(); !ok || e.QPN != rdma.QPN(i+2) {
			t.Errorf("event %+v, %t, want number %d", e, ok, i+2)
		}
	}
	if e, ok := r.Pop(); ok {
		t.Errorf("event %+v from an empty ring", e)
	}
}

func TestLimits_Check(t *testing.T) {
	all := Limits{SGEs: 2, Inline: 8, Message: MaxMessage, WriteImm: true, Read: true, Invalidate: true, SendImm: true, Solicited: true}
	least := Limits{SGEs: 2, Inline: 8, Message: 100}
	sgl := func(n ...uint32) (s []rdma.SGE) {
		for _, n := range n {
			s = append(s, rdma.SGE{Length: n})
		}
		return s
	}
	const half = 1 << 30
	for _, tc := range []struct {
		name  string
		l     Limits
		wr    rdma.SendWR
		bytes uint32
		err   error
	}{
		{"SEND", least, rdma.SendWR{SGL: sgl(3, 4)}, 7, nil},
		{"SEND of nothing", least, rdma.SendWR{}, 0, nil},
		{"solicited without", least, rdma.SendWR{Flags: rdma.SendSolicited, SGL: sgl(1)}, 0, rdma.ErrNotSupported},
		{"signaled, solicited", all, rdma.SendWR{Flags: rdma.SendSignaled | rdma.SendSolicited, SGL: sgl(1)}, 1, nil},
		{"WRITE", least, rdma.SendWR{Op: rdma.OpWrite, SGL: sgl(100)}, 100, nil},
		{"above the longest message", least, rdma.SendWR{SGL: sgl(100, 1)}, 0, rdma.ErrInvalid},
		{"longest message", all, rdma.SendWR{SGL: sgl(half, half)}, MaxMessage, nil},
		{"lengths above 32 bits", all, rdma.SendWR{SGL: sgl(1<<31, 1<<31)}, 0, rdma.ErrInvalid},
		{"three SGEs", all, rdma.SendWR{SGL: sgl(1, 1, 1)}, 0, rdma.ErrInvalid},
		{"inline", all, rdma.SendWR{Flags: rdma.SendInline, Inline: make([]byte, 8)}, 8, nil},
		{"too many bytes inline", all, rdma.SendWR{Flags: rdma.SendInline, Inline: make([]byte, 9)}, 0, rdma.ErrInvalid},
		{"inline with an SGE", all, rdma.SendWR{Flags: rdma.SendInline, SGL: sgl(8)}, 0, rdma.ErrInvalid},
		{"inline bytes without the flag", all, rdma.SendWR{Inline: make([]byte, 8)}, 0, rdma.ErrInvalid},
		{"inline READ", all, rdma.SendWR{Op: rdma.OpRead, Flags: rdma.SendInline}, 0, rdma.ErrInvalid},
		{"READ", all, rdma.SendWR{Op: rdma.OpRead, SGL: sgl(5)}, 5, nil},
		{"READ into two SGEs", all, rdma.SendWR{Op: rdma.OpRead, SGL: sgl(5, 5)}, 0, rdma.ErrInvalid},
		{"READ without", least, rdma.SendWR{Op: rdma.OpRead, SGL: sgl(5)}, 0, rdma.ErrNotSupported},
		{"WRITE with immediate", all, rdma.SendWR{Op: rdma.OpWriteImm}, 0, nil},
		{"WRITE with immediate without", least, rdma.SendWR{Op: rdma.OpWriteImm}, 0, rdma.ErrNotSupported},
		{"receive", all, rdma.SendWR{Op: rdma.OpRecv}, 0, rdma.ErrInvalid},
		{"unknown operation", all, rdma.SendWR{Op: 99}, 0, rdma.ErrInvalid},
		{"unknown flag", all, rdma.SendWR{Flags: 1 << 7}, 0, rdma.ErrInvalid},
		{"another unknown flag", all, rdma.SendWR{Flags: 1<<5 | rdma.SendImm}, 0, rdma.ErrInvalid},
		{"invalidate", all, rdma.SendWR{Flags: rdma.SendInvalidate | rdma.SendSolicited, SGL: sgl(1)}, 1, nil},
		{"invalidate without", least, rdma.SendWR{Flags: rdma.SendInvalidate}, 0, rdma.ErrNotSupported},
		{"invalidate by WRITE", all, rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.SendInvalidate}, 0, rdma.ErrInvalid},
		{"SEND with immediate", all, rdma.SendWR{Flags: rdma.SendImm}, 0, nil},
		{"SEND with immediate without", least, rdma.SendWR{Flags: rdma.SendImm}, 0, rdma.ErrNotSupported},
		{"immediate flag of a WRITE", all, rdma.SendWR{Op: rdma.OpWriteImm, Flags: rdma.SendImm}, 0, rdma.ErrInvalid},
		{"invalidate and immediate", all, rdma.SendWR{Flags: rdma.SendInvalidate | rdma.SendImm}, 0, rdma.ErrInvalid},
	} {
		n, err := tc.l.Check(&tc.wr)
		if n != tc.bytes || !errors.Is(err, tc.err) {
			t.Errorf("%s: %d, %v, want %d, %v", tc.name, n, err, tc.bytes, tc.err)
		}
	}
}

func TestLimitsOf(t *testing.T) {
	got := LimitsOf(rdma.DeviceAttr{MaxInline: 64, MaxSGE: 8, RDMARead: true, SendWithInv: true, Solicited: true}, 3)
	want := Limits{SGEs: 3, Inline: 64, Message: MaxMessage, Read: true, Invalidate: true, Solicited: true}
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// reasonOf returns the code that an error declines with.
func reasonOf(err error) Reason {
	var d *DeclineError
	if errors.As(err, &d) {
		return d.Reason
	}
	return ReasonNone
}

func TestSelectVersion(t *testing.T) {
	ext := func(change func(*V2Extension)) V2Extension {
		e := V2Extension{EIDs: ListOf(eid("A"), eid("B")), Release: 1, MaxConns: 255, MaxLinks: 2}
		if change != nil {
			change(&e)
		}
		return e
	}
	both := Support{V1: true, V2: true, AnySubnet: true, EIDs: []EID{eid("Z"), eid("B"), eid("A")}, Release: 1, MaxConns: 64, MaxLinks: 1}
	only1 := Support{V1: true, AnySubnet: true}
	only2 := both
	only2.V1 = false
	old := only2
	old.Release = 0
	tests := []struct {
		name   string
		p      Proposal
		ours   Support
		want   Selection
		reason Reason
	}{
		{"RFC 7609", Proposal{Version: 1, V2: ModeNone}, both, Selection{Version: 1}, 0},
		{"version 1 in a header of version 2", Proposal{Version: 2, V2: ModeNone}, only1, Selection{Version: 1}, 0},
		{"version 2, our first EID that the client has", Proposal{Version: 2, Ext: ext(nil)}, both, Selection{Version: 2, EID: eid("B"), Release: 1, MaxConns: 64, MaxLinks: 1}, 0},
		{"a later version", Proposal{Version: 3, V1: ModeNone, Ext: ext(nil)}, both, Selection{Version: 2, EID: eid("B"), Release: 1, MaxConns: 64, MaxLinks: 1}, 0},
		{"a later release", Proposal{Version: 2, Ext: ext(func(e *V2Extension) { e.Release = 9 })}, both, Selection{Version: 2, EID: eid("B"), Release: 1, MaxConns: 64, MaxLinks: 1}, 0},
		{"client's limits are lower", Proposal{Version: 2, Ext: ext(func(e *V2Extension) { e.MaxConns, e.MaxLinks = 16, 1 })}, both, Selection{Version: 2, EID: eid("B"), Release: 1, MaxConns: 16, MaxLinks: 1}, 0},
		{"release 0 has no limits", Proposal{Version: 2, Ext: ext(func(e *V2Extension) { e.Release, e.MaxConns, e.MaxLinks = 0, 0, 0 })}, both, Selection{Version: 2, EID: eid("B"), MaxConns: 64, MaxLinks: 1}, 0},
		{"we have release 0", Proposal{Version: 2, Ext: ext(nil)}, old, Selection{Version: 2, EID: eid("B"), MaxConns: 64, MaxLinks: 1}, 0},
		{"no common EID, version 1 remains", Proposal{Version: 2, Ext: ext(func(e *V2Extension) { e.EIDs = ListOf(eid("C")) })}, both, Selection{Version: 1, NoV2: ReasonNoUEID}, 0},
		{"no common EID", Proposal{Version: 2, V1: ModeNone, Ext: ext(func(e *V2Extension) { e.EIDs = ListOf(eid("C")) })}, both, Selection{}, ReasonNoUEID},
		{"no EID", Proposal{Version: 2, V1: ModeNone, Ext: ext(func(e *V2Extension) { e.EIDs = List[EID]{} })}, both, Selection{}, ReasonNoUEID},
		{"too few connections", Proposal{Version: 2, V1: ModeNone, Ext: ext(func(e *V2Extension) { e.MaxConns = 15 })}, both, Selection{}, ReasonMaxConnErr},
		{"no links", Proposal{Version: 2, V1: ModeNone, Ext: ext(func(e *V2Extension) { e.MaxLinks = 0 })}, both, Selection{}, ReasonMaxLinkErr},
		{"they 2, we 1", Proposal{Version: 2, V1: ModeNone, Ext: ext(nil)}, only1, Selection{}, ReasonVersMismat},
		{"they 1, we 2", Proposal{Version: 1, V2: ModeNone}, only2, Selection{}, ReasonVersMismat},
		{"they 2 with SMC-D for 1, we 1", Proposal{Version: 2, V1: ModeD, Ext: ext(nil)}, only1, Selection{}, ReasonVersMismat},
		{"SMC-D of version 1", Proposal{Version: 1, V1: ModeD, V2: ModeNone}, both, Selection{}, ReasonModeUnsupp},
		{"SMC-D of version 2", Proposal{Version: 2, V1: ModeNone, V2: ModeD}, both, Selection{}, ReasonModeUnsupp},
		{"SMC-D of both", Proposal{Version: 2, V1: ModeD, V2: ModeD}, both, Selection{}, ReasonModeUnsupp},
		{"both modes", Proposal{Version: 2, V1: ModeBoth, V2: ModeBoth, Ext: ext(nil)}, only1, Selection{Version: 1}, 0},
		{"nothing offered", Proposal{Version: 2, V1: ModeNone, V2: ModeNone}, both, Selection{}, ReasonVersMismat},
		{"we speak nothing", Proposal{Version: 1, V2: ModeNone}, Support{}, Selection{}, ReasonVersMismat},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := SelectVersion(tt.p, tt.ours)
			if r := reasonOf(err); r != tt.reason || (err != nil) != (tt.reason != 0) {
				t.Errorf("error %v, want %v", err, tt.reason)
			}
			if err != nil && !errors.Is(err, ErrDecline) {
				t.Errorf("%v does not allow the fallback", err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	smcd, err := ParseProposal(load(t, "published/proposal-smcd-ipv4"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := SelectVersion(smcd, both); reasonOf(err) != ReasonModeUnsupp {
		t.Errorf("published SMC-D Proposal: %v", err)
	}
}

// What both sides of the captured negotiations sent passes; each announced
// value that the other side did not offer is declined with Linux's code.
func TestCheckAcceptConfirm(t *testing.T) {
	tests := []struct {
		name   string
		m      messages
		accept func(*Proposal, *Accept)
		reason Reason
		confrm func(*Accept, *Confirm)
	}{
		{name: "captured first contact", m: firstV2(t)},
		{name: "captured subsequent contact", m: captured(t, "proposal-01", "accept-02", "confirm-02")},
		{name: "captured version 1", m: firstV1(t)},
		{name: "EID", accept: func(_ *Proposal, a *Accept) { a.EID = eid("OTHER") }, reason: ReasonNoUEID},
		{name: "release", accept: func(_ *Proposal, a *Accept) { a.Ext.Release = 2 }, reason: ReasonReleaseErr},
		{name: "connections too few", accept: func(_ *Proposal, a *Accept) { a.Ext.MaxConns = 15 }, reason: ReasonMaxConnErr},
		{name: "connections above the offer", accept: func(p *Proposal, _ *Accept) { p.Ext.MaxConns = 200 }, reason: ReasonMaxConnErr},
		{name: "links too few", accept: func(_ *Proposal, a *Accept) { a.Ext.MaxLinks = 0 }, reason: ReasonMaxLinkErr},
		{name: "more links than Linux has", accept: func(p *Proposal, a *Accept) { p.Ext.MaxLinks, a.Ext.MaxLinks = 8, 3 }},
		{name: "links above the offer", accept: func(p *Proposal, _ *Accept) { p.Ext.MaxLinks = 1 }, reason: ReasonMaxLinkErr},
		{name: "release 0 has no limits", accept: func(_ *Proposal, a *Accept) { a.Ext.Release, a.Ext.MaxConns, a.Ext.MaxLinks = 0, 0, 0 }},
		{name: "version not offered", accept: func(p *Proposal, _ *Accept) { p.V2 = ModeD }, reason: ReasonModeUnsupp},
		{name: "release confirmed", confrm: func(_ *Accept, c *Confirm) { c.Ext.Release = 0 }, reason: ReasonReleaseErr},
		{name: "connections confirmed", confrm: func(_ *Accept, c *Confirm) { c.Ext.MaxConns-- }, reason: ReasonMaxConnErr},
		{name: "links confirmed", confrm: func(_ *Accept, c *Confirm) { c.Ext.MaxLinks-- }, reason: ReasonMaxLinkErr},
		{name: "no extension", confrm: func(_ *Accept, c *Confirm) { c.FirstContact = false }, reason: ReasonReleaseErr},
		{name: "release 0 confirmed", confrm: func(a *Accept, c *Confirm) { a.Ext.Release, c.Ext.Release, c.Ext.MaxConns = 0, 0, 0 }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := tt.m
			if m.raw == nil {
				m = firstV2(t)
			}
			if tt.accept != nil {
				tt.accept(&m.proposal, &m.accept)
			}
			_, err := accepted(m.proposal, m.accept)
			if tt.confrm != nil {
				tt.confrm(&m.accept, &m.confirm)
			}
			if tt.confrm != nil || tt.accept == nil && err == nil {
				err = CheckConfirm(m.accept, m.confirm)
			}
			if got := reasonOf(err); got != tt.reason || (err != nil) != (tt.reason != 0) {
				t.Errorf("%v, want %v", err, tt.reason)
			}
		})
	}
}

func TestEID(t *testing.T) {
	if _, ok := NewEID(""); ok {
		t.Error("empty EID")
	}
	if _, ok := NewEID(string(make([]byte, 33))); ok {
		t.Error("EID of 33 bytes")
	}
	if e, ok := NewEID("SMCV2-DEFAULT-UEID"); !ok || e.String() != "SMCV2-DEFAULT-UEID" || e[31] != ' ' {
		t.Errorf("%q, %v", e[:], ok)
	}
}

// Every value has a text, known or not.
func TestStrings(t *testing.T) {
	tests := []struct{ got, want string }{
		{TypeProposal.String(), "Proposal"},
		{Type(9).String(), "Type(9)"},
		{ModeBoth.String(), "SMC-R+SMC-D"},
		{Mode(7).String(), "Mode(7)"},
		{OSzOS.String(), "z/OS"},
		{OSType(9).String(), "OSType(9)"},
		{StateLateDecline.String(), "LateDecline"},
		{State(99).String(), "State(99)"},
		{OutputAbort.String(), "Abort"},
		{OutputKind(0).String(), "OutputKind(0)"},
		{RMBESize(2).String(), "64KiB"},
		{(&ParseError{Offset: 4, What: "x"}).Error(), "clc: byte 4: x"},
		{(&DeclineError{Reason: ReasonMem, What: "x"}).Error(), "clc: decline (MEM): x"},
		{firstV2(t).accept.Ext.Host(), "g1"},
	}
	for _, tt := range tests {
		if tt.got != tt.want {
			t.Errorf("%q, want %q", tt.got, tt.want)
		}
	}
	for s := range numStates {
		if s.String() == "" || s.String()[0] == 'S' {
			t.Errorf("state %d has no name", uint8(s))
		}
	}
}

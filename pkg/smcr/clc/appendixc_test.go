// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// rule is a row of RFC 7609 appendix C, as far as CLC has to do with it, for
// one side of the negotiation.
type rule struct {
	name   string
	server bool
	again  bool // subsequent contact
	steps  string
	// want is how the last step ends. "vA" is the version of the Accept.
	want string
}

// check runs a rule in version 1 and in version 2.
func (r rule) check(t *testing.T) {
	for version, m := range map[string]messages{"1": r.captured(t, V1), "2": r.captured(t, V2)} {
		t.Run(r.name+", version "+version, func(t *testing.T) {
			lines := strings.Split(strings.TrimSpace(script(t, r.server, m, r.steps)), "\n")
			want := strings.ReplaceAll(r.want, "vA", "v"+version)
			if diff := cmp.Diff(want, lines[len(lines)-1]); diff != "" {
				t.Errorf("%s (-want +got):\n%s", r.steps, diff)
			}
		})
	}
}

func (r rule) captured(t *testing.T, version uint8) messages {
	switch {
	case version == V1 && r.again:
		return againV1(t)
	case version == V1:
		return firstV1(t)
	case r.again:
		return captured(t, "proposal-01", "accept-02", "confirm-02")
	}
	return firstV2(t)
}

func checkRules(t *testing.T, rules []rule) {
	for _, r := range rules {
		r.check(t)
	}
}

// C.1: a Decline stands in place of a message that is due, it never follows
// another message of its sender, and it is not answered.
func TestSectionC_1_DeclineDuringCLC(t *testing.T) {
	checkRules(t, []rule{
		{"client declines in place of the Proposal", false, false, "decline", "Send(Decline v1 NOSMCDEV) Declined(NOSMCDEV) -> Declined"},
		{"server declines in place of the Accept", true, false, "<proposal decline", "Send(Decline v2 NOSMCDEV) Declined(NOSMCDEV) -> Declined"},
		{"client declines in place of the Confirm", false, false, "propose <accept decline", "Send(Decline vA NOSMCDEV) Declined(NOSMCDEV) -> Declined"},
		{"client declines in place of the Confirm, subsequent contact", false, true, "propose <accept decline", "Send(Decline vA NOSMCDEV) Declined(NOSMCDEV) -> Declined"},
		{"server is declined in place of the Proposal", true, false, "<decline", "Declined(NOSMCDEV peer) -> Declined"},
		{"client is declined in place of the Accept", false, false, "propose <decline", "Declined(NOSMCDEV peer) -> Declined"},
		{"server is declined in place of the Confirm", true, false, "<proposal accept <decline", "Declined(NOSMCDEV peer) -> Declined"},
		{"server is declined in place of the Confirm, subsequent contact", true, true, "<proposal accept <decline", "Declined(NOSMCDEV peer) -> Declined"},
		{"client does not chase its Proposal", false, false, "propose decline", "-> WaitAccept"},
		{"client declines once the Accept is there", false, false, "propose decline <accept", "Send(Decline vA NOSMCDEV) Declined(NOSMCDEV) -> Declined"},
		{"server does not chase its Accept, first contact", true, false, "<proposal accept decline", "-> WaitConfirm"},
		{"server declines once the Confirm is there, first contact", true, false, "<proposal accept decline <confirm", "Send(Decline v2 NOSMCDEV) Declined(NOSMCDEV cross) -> Declined"},
		{"server breaks the connection after its Accept, subsequent contact", true, true, "<proposal accept decline", "Abort(too late to fall back to TCP) -> Aborted"},
		{"client is committed by its Confirm, subsequent contact", false, true, "propose <accept confirm decline", "Abort(too late to fall back to TCP) -> Aborted"},
	})
}

// C.2: during the LLC part of a first contact both may still decline.
func TestSectionC_2_DeclineDuringLLC(t *testing.T) {
	checkRules(t, []rule{
		{"client declines", false, false, "propose <accept confirm decline", "Send(Decline vA NOSMCDEV) Declined(NOSMCDEV cross) -> Declined"},
		{"server declines", true, false, "<proposal accept <confirm decline", "Send(Decline v2 NOSMCDEV) Declined(NOSMCDEV cross) -> Declined"},
		{"client is declined", false, false, "propose <accept confirm <decline", "Declined(NOSMCDEV peer) -> Declined"},
		{"server is declined", true, false, "<proposal accept <confirm <decline", "Declined(NOSMCDEV peer) -> Declined"},
		{"a subsequent contact has no LLC part: client", false, true, "propose <accept confirm <bytes", "Abort(unexpected data) -> Aborted"},
		{"a subsequent contact has no LLC part: server", true, true, "<proposal accept <confirm <bytes", "Abort(unexpected data) -> Aborted"},
	})
}

// C.3: past the point of no return the only way out is a reset.
func TestSectionC_3_PointOfNoReturn(t *testing.T) {
	checkRules(t, []rule{
		{"server has sent ADD LINK, or got its answer", true, false, "<proposal accept <confirm pass decline", "Abort(too late to fall back to TCP) -> Aborted"},
		{"client has answered ADD LINK, or got the second CONFIRM LINK", false, false, "propose <accept confirm pass decline", "Abort(too late to fall back to TCP) -> Aborted"},
		{"server gets a Decline that comes too late", true, false, "<proposal accept <confirm pass <bytes", "Abort(unexpected data) -> Aborted"},
		{"client gets a Decline that comes too late", false, false, "propose <accept confirm pass <bytes", "Abort(unexpected data) -> Aborted"},
		{"a Decline is half read when the server passes the point", true, false, "<proposal accept <confirm <decline-head pass", "Abort(too late to fall back to TCP) -> Aborted"},
		{"a Decline is half read when the client passes the point", false, false, "propose <accept confirm <decline-head pass", "Abort(too late to fall back to TCP) -> Aborted"},
		{"server after its Accept, subsequent contact", true, true, "<proposal accept decline", "Abort(too late to fall back to TCP) -> Aborted"},
		{"client after its Confirm, subsequent contact", false, true, "propose <accept confirm decline", "Abort(too late to fall back to TCP) -> Aborted"},
	})
}

// C.4: the client finds that the server means a link that it does not have.
func TestSectionC_4_OutOfSync(t *testing.T) {
	checkRules(t, []rule{
		{"client tells the server", false, true, "propose <accept decline:sync", "Send(Decline vA SYNCERR S) Declined(SYNCERR S) -> Declined"},
		{"server is told", true, true, "<proposal accept <decline-sync", "Declined(SYNCERR peer S) -> Declined"},
	})
}

// C.5: a peer that does not answer in time is not worth a fallback.
func TestSectionC_5_Timeouts(t *testing.T) {
	checkRules(t, []rule{
		{"no Proposal", true, false, "wait:6s", "Abort(no answer in time) -> Aborted"},
		{"no Accept", false, false, "propose wait:6s", "Abort(no answer in time) -> Aborted"},
		{"no Confirm", true, false, "<proposal accept wait:6s", "Abort(no answer in time) -> Aborted"},
		{"half a message", false, false, "propose <decline-head wait:6s", "Abort(no answer in time) -> Aborted"},
		{"not before its time", false, false, "propose wait:5999ms", "-> WaitAccept"},
	})
}

// C.6: what is not the message that is due resets the connection; a reserved
// value in it is declined.
func TestSectionC_6_ProtocolErrors(t *testing.T) {
	checkRules(t, []rule{
		{"application data in place of the Proposal", true, false, "<http", "Abort(parse error) -> Aborted"},
		{"application data in place of the Accept", false, false, "propose <http", "Abort(parse error) -> Aborted"},
		{"application data in place of the Confirm", true, false, "<proposal accept <http", "Abort(parse error) -> Aborted"},
		{"application data during LLC, client", false, false, "propose <accept confirm <http", "Abort(parse error) -> Aborted"},
		{"application data during LLC, server", true, false, "<proposal accept <confirm <http", "Abort(parse error) -> Aborted"},
		{"reserved MTU in the Accept", false, false, "propose <accept-mtu", "Send(Decline vA CNFERR) Declined(CNFERR) -> Declined"},
		{"reserved MTU in the Confirm", true, false, "<proposal accept <confirm-mtu", "Send(Decline v2 CNFERR) Declined(CNFERR cross) -> Declined"},
		{"the MTU counts on first contact only, client", false, true, "propose <accept-mtu", "Accepted -> Deciding"},
		{"the MTU counts on first contact only, server", true, true, "<proposal accept <confirm-mtu", "Confirmed -> Committed"},
	})
}

// C.7, C.7.1: LLC failures that CLC carries to the peer.
func TestSectionC_7_LLCFailures(t *testing.T) {
	checkRules(t, []rule{
		{"client's CONFIRM LINK answer cannot be sent", false, false, "propose <accept confirm decline", "Send(Decline vA NOSMCDEV) Declined(NOSMCDEV cross) -> Declined"},
		{"server's CONFIRM LINK cannot be sent", true, false, "<proposal accept <confirm decline", "Send(Decline v2 NOSMCDEV) Declined(NOSMCDEV cross) -> Declined"},
		{"no CONFIRM LINK at the client: wait for the reason", false, false, "propose <accept confirm decline:cl", "-> LateDecline"},
		{"no CONFIRM LINK at the client: the reason comes", false, false, "propose <accept confirm decline:cl <decline", "Declined(NOSMCDEV peer) -> Declined"},
		{"no CONFIRM LINK at the client: no reason comes", false, false, "propose <accept confirm decline:cl wait:3s", "Send(Decline vA TIMEOUT_CL) Declined(TIMEOUT_CL cross) -> Declined"},
		{"no CONFIRM LINK answer at the server: no reason comes", true, false, "<proposal accept <confirm decline:cl wait:3s", "Send(Decline v2 TIMEOUT_CL) Declined(TIMEOUT_CL cross) -> Declined"},
		{"no ADD LINK at the client: no reason comes", false, false, "propose <accept confirm decline:al wait:3s", "Send(Decline vA TIMEOUT_AL) Declined(TIMEOUT_AL cross) -> Declined"},
		{"no ADD LINK answer at the server", true, false, "<proposal accept <confirm pass decline:al", "Abort(too late to fall back to TCP) -> Aborted"},
	})
}

// What a machine does about each byte of a message that is not what it should
// be: which bytes make the message another one (C.6: reset), which ask for
// something we do not have (Decline), and which are just values.
func TestSectionC_6_EveryByte(t *testing.T) {
	first1, first2 := firstV1(t), firstV2(t)
	again2 := captured(t, "proposal-01", "accept-02", "confirm-02")
	tests := []struct {
		name   string
		server bool
		m      messages
		typ    Type
		steps  string
		want   string
	}{
		{"Proposal, version 1", true, first1, TypeProposal, "<proposal", `
			reset 0-7,38-39,84,87-91`},
		{"Proposal, version 2", true, first2, TypeProposal, "<proposal", `
			reset 0-7,50-51,80-81,152-155
			MAXCONNERR 104
			NOUEID 120-151`},
		{"Accept, version 1", false, first1, TypeAccept, "propose <accept", `
			reset 0-7,64-67
			CNFERR 50`},
		{"Accept, version 2, first contact", false, first2, TypeAccept, "propose <accept", `
			reset 0-7,156-159
			CNFERR 50
			NOUEID 64-95
			RELEASEERR 105
			MAXCONNERR 140
			MAXLINKERR 141`},
		{"Accept, version 2, subsequent contact", false, again2, TypeAccept, "propose <accept", `
			reset 0-7,104-107
			NOUEID 64-95`},
		{"Confirm, version 1", true, first1, TypeConfirm, "<proposal accept <confirm", `
			reset 0-7,64-67
			CNFERR 50`},
		{"Confirm, version 2, first contact", true, first2, TypeConfirm, "<proposal accept <confirm", `
			reset 0-7,156,176-179
			CNFERR 50
			RELEASEERR 105
			MAXCONNERR 140
			MAXLINKERR 141`},
		{"Confirm, version 2, subsequent contact", true, again2, TypeConfirm, "<proposal accept <confirm", `
			reset 0-7,104-107`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			whole := tt.m.raw[tt.typ]
			outcomes := map[string][]int{}
			var order []string
			for off := range whole {
				m := tt.m
				m.raw = map[Type][]byte{}
				for k, v := range tt.m.raw {
					m.raw[k] = v
				}
				bad := bytes.Clone(whole)
				bad[off] ^= 0xff
				m.raw[tt.typ] = bad
				lines := strings.Split(strings.TrimSpace(script(t, tt.server, m, tt.steps)), "\n")
				last := lines[len(lines)-1]
				o := "reset"
				if _, after, ok := strings.Cut(last, "Declined("); ok {
					o = after[:strings.IndexAny(after, ") ")]
				} else if !strings.Contains(last, "Aborted") && !strings.Contains(last, "not taken") {
					continue
				}
				if outcomes[o] == nil {
					order = append(order, o)
				}
				outcomes[o] = append(outcomes[o], off)
			}
			var got strings.Builder
			for _, o := range order {
				fmt.Fprintf(&got, "\n%s %s", o, ranges(outcomes[o]))
			}
			if diff := cmp.Diff(strings.ReplaceAll(tt.want, "\t", ""), got.String()); diff != "" {
				t.Errorf("bytes that matter (-want +got):\n%s", diff)
			}
		})
	}
}

// ranges writes ascending numbers as "0-7,39".
func ranges(n []int) string {
	var parts []string
	for i := 0; i < len(n); {
		j := i
		for j+1 < len(n) && n[j+1] == n[j]+1 {
			j++
		}
		if i == j {
			parts = append(parts, fmt.Sprint(n[i]))
		} else {
			parts = append(parts, fmt.Sprintf("%d-%d", n[i], n[j]))
		}
		i = j + 1
	}
	return strings.Join(parts, ",")
}

// Both sides wait as long for CONFIRM LINK, so that when no path carries it
// they time out together. The server tells the client before that would tell
// the server: Linux takes a Decline that crosses its own for the program's
// data. Linux itself waits 1 s for a Decline, and was seen to send its own 0.25
// s later than that.
func TestSectionC_7_DeclinesDoNotCross(t *testing.T) {
	const linux, linuxLate = time.Second, 250 * time.Millisecond
	now := time.Unix(0, 0)
	client, server := NewClient(Config{}), NewServer(now, Config{})
	client.becomeLateDecline(now)
	server.becomeLateDecline(now)
	clientDeclines, _ := client.NextTimeout()
	serverDeclines, _ := server.NextTimeout()
	if d := clientDeclines.Sub(now); d < 2*(linux+linuxLate) {
		t.Errorf("a client declines after %v: a server of Linux may do so at the same time", d)
	}
	if d := serverDeclines.Sub(now); d > linux/2 {
		t.Errorf("a server declines after %v: a client of Linux may do so at the same time", d)
	}
	if d := clientDeclines.Sub(serverDeclines); d < linux {
		t.Errorf("a client of ours declines only %v after a server of ours", d)
	}
}

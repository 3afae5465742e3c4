// SPDX-License-Identifier: Apache-2.0

package llc_test

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

var (
	_ llc.Message = llc.ConfirmLink{}
	_ llc.Message = llc.RequestAddLink{}
)

func seq16(from byte) (b [16]byte) {
	for i := range b {
		b[i] = from + byte(i)
	}
	return b
}

func header(version uint8) llc.Header { return llc.Header{Version: version, Response: true} }

func token(n uint32) llc.RToken {
	return llc.RToken{RKey: rdma.RKey(n), VAddr: 0xffff_0000_0000_0000 | uint64(n)<<8}
}

// samples are messages with all fields set, for each layout.
func samples() map[string]llc.Message {
	others := func(n byte) (t [3]llc.LinkRToken) {
		for i := range t {
			t[i] = llc.LinkRToken{Link: llc.LinkID(n) + llc.LinkID(i), RToken: token(uint32(n)<<24 + uint32(i))}
		}
		return t
	}
	pairs := func(n int) (p []llc.RTokenPair) {
		for i := range n {
			p = append(p, llc.RTokenPair{Reference: rdma.RKey(i), New: token(uint32(i) << 4)})
		}
		return p
	}
	addLink := llc.AddLink{
		Header: header(1), MAC: rdma.MAC{1, 2, 3, 4, 5, 6}, GID: seq16(0x20),
		QPN: 0x123456, Link: 7, MTU: rdma.MTU2048, PSN: 0xabcdef,
	}
	addLinkLinux, addLinkReject, addLinkV2, addLinkRejectV2 := addLink, addLink, addLink, addLink
	addLinkLinux.Dialect = llc.DialectLinux
	addLinkReject.Reject, addLinkReject.Reason = true, llc.RejectInvalidMTU
	addLinkV2.Header, addLinkV2.Dialect = header(2), llc.DialectLinux
	addLinkV2.Ext = llc.AddLinkExt{Direct: true, TargetGID: seq16(0x60), Pairs: pairs(llc.MaxPairsV2)}
	addLinkBig := addLinkV2
	addLinkBig.BigEndian = true
	// 72+16*124 = 0x0808 bytes: only the number of pairs shows the order.
	addLinkBig.Ext.Pairs = pairs(124)
	addLinkRejectV2.Header, addLinkRejectV2.Dialect, addLinkRejectV2.Reject = header(2), llc.DialectLinux, true
	confirmLink := llc.ConfirmLink{
		Header: header(1), Flags: llc.NoRMBEEyecatcher, MAC: rdma.MAC{6, 5, 4, 3, 2, 1},
		GID: seq16(0x40), QPN: rdma.MaxQPN, Link: 255, UserID: 0xdeadbeef, MaxLinks: 8,
	}
	confirmLinkV2 := confirmLink
	confirmLinkV2.Version, confirmLinkV2.MaxConns = 2, 255
	confirmLinkBig := confirmLinkV2
	confirmLinkBig.BigEndian = true
	o := others(3)
	return map[string]llc.Message{
		"confirm link":             confirmLink,
		"confirm link v2":          confirmLinkV2,
		"confirm link v2 big":      confirmLinkBig,
		"add link RFC":             addLink,
		"add link Linux":           addLinkLinux,
		"add link reject":          addLinkReject,
		"add link v2":              addLinkV2,
		"add link v2 big":          addLinkBig,
		"add link v2 reject":       addLinkRejectV2,
		"add link continuation":    llc.AddLinkContinuation{Header: header(1), Link: 3, Remaining: 255, Pairs: [2]llc.RTokenPair(pairs(2))},
		"delete link":              llc.DeleteLink{Header: header(1), Orderly: true, Link: 9, Reason: llc.DeleteOperator},
		"delete link all":          llc.DeleteLink{Header: header(2), All: true, Reason: llc.DeleteUnknownGroup},
		"confirm rkey v2":          llc.ConfirmRKey{Header: header(2), Others: 2, This: token(1), Other: [2]llc.LinkRToken(o[:2])},
		"confirm rkey":             llc.ConfirmRKey{Header: header(1), Negative: true, Retry: true, Others: 7, This: token(1), Other: [2]llc.LinkRToken(o[:2])},
		"confirm rkey cont":        llc.ConfirmRKeyContinuation{Header: header(1), Negative: true, Remaining: 5, Other: o},
		"delete rkey":              llc.DeleteRKey{Header: header(1), Negative: true, Count: 8, ErrorMask: 0b0101_0000, RKeys: [8]rdma.RKey{1, 2, 3, 4, 5, 6, 7, 8}},
		"delete rkey v2 of 1":      llc.DeleteRKeyV2{Header: header(2), RKeys: []rdma.RKey{0xfeedface}},
		"delete rkey v2 request":   llc.DeleteRKeyV2{Header: llc.Header{Version: 2}, RKeys: []rdma.RKey{0xfeedface}},
		"delete rkey v2 short":     llc.DeleteRKeyV2{Header: header(2), Negative: true, Invalid: 255, RKeys: make([]rdma.RKey, 9), Omitted: 246},
		"delete rkey v2 of 255":    llc.DeleteRKeyV2{Header: header(2), Negative: true, Invalid: 3, RKeys: slices.Repeat([]rdma.RKey{5}, 255)},
		"test link v2":             llc.TestLink{Header: header(2), UserData: seq16(9)},
		"test link":                llc.TestLink{Header: header(1), UserData: seq16(1)},
		"request add link of 1":    llc.RequestAddLink{Header: header(2), GIDs: []rdma.GID{seq16(3)}},
		"request add link of 255":  llc.RequestAddLink{Header: header(2), GIDs: slices.Repeat([]rdma.GID{seq16(3)}, 255)},
		"request add link of none": llc.RequestAddLink{Header: header(2)},
	}
}

func dialectOf(m llc.Message) llc.Dialect {
	if a, ok := m.(llc.AddLink); ok {
		return a.Dialect
	}
	return llc.DialectRFC
}

func TestParse_inverseOfAppend(t *testing.T) {
	for name, m := range samples() {
		t.Run(name, func(t *testing.T) {
			const before = "before"
			b := m.Append([]byte(before))
			if !bytes.HasPrefix(b, []byte(before)) {
				t.Fatalf("Append overwrote what was there: %q", b[:len(before)])
			}
			b = b[len(before):]
			if len(b) > llc.MaxSizeV2 || len(b) < llc.Size {
				t.Fatalf("%d bytes", len(b))
			}
			got, err := llc.Parse(dialectOf(m), llc.Version2, b)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(m, got); diff != "" {
				t.Errorf("parsed (-sent +got):\n%s", diff)
			}
			for n := range len(b) {
				if answersIn44Bytes(m) && n == llc.Size {
					continue
				}
				if m, err := llc.Parse(dialectOf(m), llc.Version2, b[:n]); err == nil {
					t.Errorf("%d of %d bytes parsed as %v", n, len(b), m)
				}
			}
			// Only the rejection of version 2 may be followed by anything.
			longer, err := llc.Parse(dialectOf(m), llc.Version2, append(b, 0))
			if a, ok := m.(llc.AddLink); err == nil && (!ok || !a.Reject || a.Version == llc.Version1) {
				t.Errorf("%d bytes and one more parsed as %v", len(b), longer)
			}
			if want := name != "delete rkey v2 request"; m.String() == "" || m.IsResponse() != want {
				t.Errorf("String() %q, IsResponse() %t", m, m.IsResponse())
			}
		})
	}
}

// Layouts of version 2 that no capture shows, by hand.
func TestAppend_version2Layouts(t *testing.T) {
	gid := []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2}
	for name, tt := range map[string]struct {
		m    llc.Message
		want []byte
	}{
		"request add link": {
			llc.RequestAddLink{GIDs: []rdma.GID{rdma.GID(gid), rdma.GID(gid)}},
			slices.Concat([]byte{0x25, 60, 0, 0}, make([]byte, 20), []byte{2, 0, 0, 0}, gid, gid),
		},
		"delete rkey": {
			llc.DeleteRKeyV2{RKeys: []rdma.RKey{1, 2, 3, 4, 5, 6, 7, 8, 9, 0xfeedface}},
			[]byte{
				0x29, 48, 0, 0, 10, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 5,
				0, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0, 9, 0xfe, 0xed, 0xfa, 0xce,
			},
		},
		"big endian add link of no keys": {
			llc.AddLink{
				Header: llc.Header{Version: 2, BigEndian: true}, MAC: rdma.MAC{1, 2, 3, 4, 5, 6}, GID: rdma.GID(gid),
				QPN: 0x11, Link: 3, MTU: rdma.MTU1024, PSN: 0xabcdef, Ext: llc.AddLinkExt{Direct: true, TargetGID: rdma.GID(gid)},
			},
			slices.Concat(
				[]byte{0x22, 0, 72, 0, 1, 2, 3, 4, 5, 6, 0, 0}, gid, []byte{0, 0, 0x11, 3, 3, 0xab, 0xcd, 0xef}, make([]byte, 8),
				[]byte{0x80, 0}, gid, make([]byte, 10)),
		},
	} {
		if diff := cmp.Diff(tt.want, tt.m.Append(nil)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// answersIn44Bytes: a response of DELETE RKEY may have fewer keys than it counts, and one of ADD LINK
// without RTokens is a rejection.
func answersIn44Bytes(m llc.Message) bool {
	switch m.(type) {
	case llc.AddLink, llc.DeleteRKeyV2:
		return m.IsResponse()
	}
	return false
}

// Linux answers a long DELETE RKEY in 44 bytes, with the count of the request.
func TestParseDeleteRKeyV2_shortResponse(t *testing.T) {
	b := make([]byte, llc.Size)
	copy(b, []byte{0x29, llc.Size, 0, 0xa0, 200, 17})
	want := llc.DeleteRKeyV2{Header: header(2), Negative: true, Invalid: 17, RKeys: make([]rdma.RKey, 9), Omitted: 191}
	got, err := llc.ParseDeleteRKeyV2(b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	b[3] &^= 0x80
	if m, err := llc.ParseDeleteRKeyV2(b); err == nil {
		t.Errorf("a request of 44 bytes with 200 keys parsed as %v", m)
	}
}

// A client may reject ADD LINK by sending all of it back.
func TestParseAddLink_rejectionOfAnyLength(t *testing.T) {
	for _, n := range []int{llc.Size, llc.Size + 1, 88, llc.MaxSizeV2} {
		b := make([]byte, n)
		copy(b, samples()["add link v2"].Append(nil))
		b[3] |= 0xc0
		if m, err := llc.ParseAddLink(llc.DialectLinux, b); err != nil || !m.Reject || len(m.Ext.Pairs) != 0 {
			t.Errorf("%d bytes: %v, %v", n, m, err)
		}
	}
}

// Linux sends 44 bytes of an ADD LINK back that comes while it waits for CONFIRM LINK.
func TestParseAddLink_sentBack(t *testing.T) {
	m, ok := samples()["add link v2"].(llc.AddLink)
	if !ok {
		t.Fatal("no ADD LINK")
	}
	m.Response = false
	b := m.Append(nil)[:llc.Size]
	b[3] |= 0x80
	m.Response, m.Reject, m.Ext = true, true, llc.AddLinkExt{}
	got, err := llc.ParseAddLink(llc.DialectLinux, b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(m, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The bytes of the RFC's ADD LINK, by hand from figure 32.
func TestSectionA_3_2_AddLink(t *testing.T) {
	want := []byte{
		0x02, 44, 0x02, 0xc0, 1, 2, 3, 4, 5, 6,
		0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x2b, 0x2c, 0x2d, 0x2e, 0x2f,
		0x12, 0x34, 0x56, 7, 0x04, 0xab, 0xcd, 0xef,
		0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
	}
	if diff := cmp.Diff(want, samples()["add link reject"].Append(nil)); diff != "" {
		t.Errorf("ADD LINK (-want +got):\n%s", diff)
	}
}

func TestParse_rejects(t *testing.T) {
	edit := func(name string, f func(b []byte) []byte) []byte { return f(samples()[name].Append(nil)) }
	set := func(at int, v byte) func([]byte) []byte {
		return func(b []byte) []byte { b[at] = v; return b }
	}
	unknown := func(t byte, optional bool) *llc.UnknownTypeError {
		return &llc.UnknownTypeError{Type: t, Optional: optional}
	}
	tests := map[string]struct {
		version uint8
		raw     []byte
		unknown *llc.UnknownTypeError // nil: want a *ParseError
	}{
		"empty":                           {1, nil, nil},
		"v1 length field":                 {1, edit("test link", set(1, 43)), nil},
		"v1 longer than 44":               {1, append(edit("test link", set(1, 44)), 0), nil},
		"v2 in a group of v1":             {1, edit("confirm link v2", set(4, 0)), unknown(0x21, false)},
		"v2 above 8 KiB":                  {2, append(edit("confirm link v2", set(4, 0)), make([]byte, llc.MaxSizeV2)...), nil},
		"unknown mandatory":               {1, edit("test link", set(0, 0x0f)), unknown(0x0f, false)},
		"type 0":                          {2, edit("test link", set(0, 0x20)), unknown(0x20, false)},
		"request add link in v1":          {2, edit("test link", set(0, 0x05)), unknown(0x05, false)},
		"unknown optional":                {2, edit("test link", set(0, 0x8a)), unknown(0x8a, true)},
		"CDC":                             {2, edit("test link", set(0, 0xfe)), unknown(0xfe, false)},
		"confirm rkey of 9 links":         {1, edit("confirm rkey", set(4, 8)), nil},
		"confirm rkey cont of 9 links":    {1, edit("confirm rkey cont", set(4, 8)), nil},
		"delete rkey of 9 keys":           {1, edit("delete rkey", set(4, 9)), nil},
		"delete rkey v2 beyond the end":   {2, edit("delete rkey v2 request", set(4, 10)), nil},
		"delete rkey v2 fewer than fit":   {2, edit("delete rkey v2 of 255", set(4, 254)), nil},
		"delete rkey v2 more invalid":     {2, edit("delete rkey v2 request", set(5, 2)), nil},
		"request add link fewer than fit": {2, edit("request add link of 255", set(24, 254)), nil},
		"add link v2 fewer than fit":      {2, edit("add link v2", set(70, 0xfa)), nil},
		"confirm link v2 of 45 bytes":     {2, append(edit("confirm link v2", set(4, 0)), 0), nil},
		"delete link v2 of 45 bytes":      {2, append(edit("delete link all", set(4, 0)), 0), nil},
		"request add link past the end":   {2, edit("request add link of 1", set(24, 2)), nil},
		"add link v2 more than fit":       {2, edit("add link v2", set(70, 0xfc)), nil},
		"add link v2 without extension":   {2, edit("add link v2", func(b []byte) []byte { b[3] &^= 0x80; return b[:44] }), nil},
		"add link v2 extension cut short": {2, edit("add link v2", func(b []byte) []byte { return b[:71] }), nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			m, err := llc.Parse(llc.DialectLinux, tt.version, tt.raw)
			if m != nil || err == nil {
				t.Fatalf("parsed as %v, %v", m, err)
			}
			var parse *llc.ParseError
			var unknown *llc.UnknownTypeError
			switch {
			case tt.unknown == nil && !errors.As(err, &parse):
				t.Errorf("got %T %v, want a *ParseError", err, err)
			case tt.unknown != nil && !errors.As(err, &unknown):
				t.Errorf("got %T %v, want a *UnknownTypeError", err, err)
			case tt.unknown != nil:
				if diff := cmp.Diff(tt.unknown, unknown); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			}
		})
	}
}

// A length field of version 2 that is wrong must not matter.
func TestParse_v2LengthIsNotTrusted(t *testing.T) {
	for name, m := range samples() {
		b := m.Append(nil)
		if b[0]>>4 != 2 {
			continue
		}
		b[1], b[2] = 0xff, 0xff
		if _, err := llc.Parse(llc.DialectLinux, llc.Version2, b); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A response is the request with one bit more.
func TestResponse_echoes(t *testing.T) {
	req := bytes.Repeat([]byte{0xff}, llc.Size)
	copy(req, []byte{byte(llc.TypeConfirmRKey), llc.Size, 0, 0, 1})
	req[43] = 0
	m, err := llc.ParseConfirmRKey(req)
	if err != nil {
		t.Fatal(err)
	}
	m.Response = true
	want := slices.Clone(req)
	want[3] = 0x80
	if diff := cmp.Diff(want, m.Append(nil)); diff != "" {
		t.Errorf("response (-want +got):\n%s", diff)
	}
}

func TestAppend_panicsOnOurMistakes(t *testing.T) {
	for name, m := range map[string]llc.Message{
		"qpn":          llc.ConfirmLink{QPN: rdma.MaxQPN + 1},
		"psn":          llc.AddLink{PSN: rdma.PSNMask + 1},
		"version":      llc.TestLink{Header: llc.Header{Version: 3}},
		"others":       llc.ConfirmRKey{Others: 8},
		"count":        llc.DeleteRKey{Count: 9},
		"v1 keys":      llc.DeleteRKey{Header: llc.Header{Version: 2}},
		"keys":         llc.DeleteRKeyV2{RKeys: make([]rdma.RKey, 256)},
		"too few keys": llc.DeleteRKeyV2{Invalid: 1},
		"short keys":   llc.DeleteRKeyV2{RKeys: make([]rdma.RKey, 9), Omitted: 1},
		"shorter keys": llc.DeleteRKeyV2{Header: header(2), RKeys: make([]rdma.RKey, 8), Omitted: 1},
		"omitted keys": llc.DeleteRKeyV2{Header: header(2), RKeys: make([]rdma.RKey, 9), Omitted: 247},
		"gids":         llc.RequestAddLink{GIDs: make([]rdma.GID, 256)},
		"pairs": llc.AddLink{
			Header: llc.Header{Version: 2},
			Ext:    llc.AddLinkExt{Pairs: make([]llc.RTokenPair, llc.MaxPairsV2+1)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			m.Append(nil)
		})
	}
}

// What a receiver asks of lists that go on in further messages, and of a mask.
func TestLists(t *testing.T) {
	for _, tt := range []struct {
		remaining uint8
		pairs     int
		others    int
		lastPairs bool
		lastOther bool
	}{
		{0, 0, 0, true, true},
		{1, 1, 1, true, true},
		{2, 2, 2, true, true},
		{3, 2, 3, false, true},
		{4, 2, 3, false, false},
		{7, 2, 3, false, false},
	} {
		a := llc.AddLinkContinuation{Remaining: tt.remaining}
		c := llc.ConfirmRKeyContinuation{Remaining: tt.remaining}
		if a.N() != tt.pairs || a.Last() != tt.lastPairs || c.N() != tt.others || c.Last() != tt.lastOther {
			t.Errorf("%d remaining: pairs %d last %t, others %d last %t", tt.remaining, a.N(), a.Last(), c.N(), c.Last())
		}
	}
	d := llc.DeleteRKey{Count: 3, ErrorMask: 0b1010_0000}
	if !d.Failed(0) || d.Failed(1) || !d.Failed(2) || d.N() != 3 {
		t.Errorf("errors of %08b: %t %t %t", d.ErrorMask, d.Failed(0), d.Failed(1), d.Failed(2))
	}
	if f := llc.NoRMBEEyecatcher; !f.Has(1) || llc.ConfirmLinkFlags(1).Has(f) {
		t.Error("Has does not ask for all bits")
	}
}

func TestString(t *testing.T) {
	for want, got := range map[string]string{
		"DELETE RKEY v2 response negative=true invalid=3 rkeys=[0x5]":             llc.DeleteRKeyV2{Header: header(2), Negative: true, Invalid: 3, RKeys: []rdma.RKey{5}}.String(),
		"DELETE RKEY v2 response negative=false invalid=0 rkeys=[0x5] and 3 more": llc.DeleteRKeyV2{Header: header(2), RKeys: []rdma.RKey{5}, Omitted: 3}.String(),
		"REQUEST ADD LINK":               llc.RequestAddLink{}.Type().String(),
		"DELETE RKEY":                    llc.DeleteRKeyV2{}.Type().String(),
		"operator":                       llc.DeleteOperator.String(),
		"none":                           llc.RejectReason(0).String(),
		"RejectReason(9)":                llc.RejectReason(9).String(),
		"Dialect(7)":                     llc.Dialect(7).String(),
		"no-eyecatcher":                  llc.NoRMBEEyecatcher.String(),
		"0x02":                           llc.ConfirmLinkFlags(2).String(),
		"llc: unknown message type 0x0f": (&llc.UnknownTypeError{Type: 15}).Error(),
		"llc: unknown optional message type 0x8f": (&llc.UnknownTypeError{Type: 0x8f, Optional: true}).Error(),
		"llc: parse TEST LINK: x":                 (&llc.ParseError{Type: llc.TypeTestLink, Detail: "x"}).Error(),
		"CONFIRM LINK":                            llc.TypeConfirmLink.String(),
		"Type(0x0f)":                              llc.Type(15).String(),
		"Linux":                                   llc.DialectLinux.String(),
		"RFC":                                     llc.DialectRFC.String(),
		"no alternate path":                       llc.RejectNoAlternatePath.String(),
		"lost path":                               llc.DeleteLostPath.String(),
		"unknown link group":                      llc.DeleteUnknownGroup.String(),
		"DeleteReason(0x00990000)":                llc.DeleteReason(0x990000).String(),
		"TEST LINK response data=0102030405060708090a0b0c0d0e0f10":            samples()["test link"].String(),
		"DELETE LINK v2 response all orderly=false reason=unknown link group": samples()["delete link all"].String(),
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestParse_allocatesNothing(t *testing.T) {
	raw := make(map[string][]byte)
	for name, m := range samples() {
		raw[name] = m.Append(nil)
	}
	buf := make([]byte, 0, llc.MaxSizeV2)
	var err error
	for name, f := range map[string]func(){
		"confirm link":          func() { m, e := llc.ParseConfirmLink(raw["confirm link"]); err = e; m.Append(buf) },
		"add link":              func() { m, e := llc.ParseAddLink(llc.DialectRFC, raw["add link RFC"]); err = e; m.Append(buf) },
		"add link continuation": func() { m, e := llc.ParseAddLinkContinuation(raw["add link continuation"]); err = e; m.Append(buf) },
		"delete link":           func() { m, e := llc.ParseDeleteLink(raw["delete link"]); err = e; m.Append(buf) },
		"confirm rkey":          func() { m, e := llc.ParseConfirmRKey(raw["confirm rkey"]); err = e; m.Append(buf) },
		"confirm rkey cont":     func() { m, e := llc.ParseConfirmRKeyContinuation(raw["confirm rkey cont"]); err = e; m.Append(buf) },
		"delete rkey":           func() { m, e := llc.ParseDeleteRKey(raw["delete rkey"]); err = e; m.Append(buf) },
		"test link":             func() { m, e := llc.ParseTestLink(raw["test link"]); err = e; m.Append(buf) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 || err != nil {
			t.Errorf("%s: %v allocations, error %v", name, n, err)
		}
	}
}

func BenchmarkParseConfirmRKey(b *testing.B) {
	raw := samples()["confirm rkey"].Append(nil)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := llc.ParseConfirmRKey(raw); err != nil {
			b.Fatal(err)
		}
	}
}

// parsers are the parsers of one type each.
var parsers = map[llc.Type]func(d llc.Dialect, b []byte) (llc.Message, error){
	llc.TypeConfirmLink:             func(_ llc.Dialect, b []byte) (llc.Message, error) { return llc.ParseConfirmLink(b) },
	llc.TypeAddLink:                 func(d llc.Dialect, b []byte) (llc.Message, error) { return llc.ParseAddLink(d, b) },
	llc.TypeAddLinkContinuation:     func(_ llc.Dialect, b []byte) (llc.Message, error) { return llc.ParseAddLinkContinuation(b) },
	llc.TypeDeleteLink:              func(_ llc.Dialect, b []byte) (llc.Message, error) { return llc.ParseDeleteLink(b) },
	llc.TypeRequestAddLink:          func(_ llc.Dialect, b []byte) (llc.Message, error) { return llc.ParseRequestAddLink(b) },
	llc.TypeConfirmRKey:             func(_ llc.Dialect, b []byte) (llc.Message, error) { return llc.ParseConfirmRKey(b) },
	llc.TypeTestLink:                func(_ llc.Dialect, b []byte) (llc.Message, error) { return llc.ParseTestLink(b) },
	llc.TypeConfirmRKeyContinuation: func(_ llc.Dialect, b []byte) (llc.Message, error) { return llc.ParseConfirmRKeyContinuation(b) },
	llc.TypeDeleteRKey: func(_ llc.Dialect, b []byte) (llc.Message, error) {
		if len(b) > 0 && b[0]>>4 == 2 {
			return llc.ParseDeleteRKeyV2(b)
		}
		return llc.ParseDeleteRKey(b)
	},
}

// FuzzParsers gives the same bytes to every parser: only that of their type
// takes them, and what it says is what Parse says.
func FuzzParsers(f *testing.F) {
	for _, messages := range captures(f) {
		for _, c := range messages {
			f.Add(uint8(llc.DialectLinux), c.raw)
		}
	}
	for _, m := range samples() {
		f.Add(uint8(dialectOf(m)), m.Append(nil))
	}
	f.Fuzz(func(t *testing.T, dialect uint8, b []byte) {
		d := llc.Dialect(dialect & 1)
		want, wantErr := llc.Parse(d, llc.Version2, b)
		for typ, parse := range parsers {
			got, err := parse(d, b)
			var pe *llc.ParseError
			var unknown *llc.UnknownTypeError
			if err != nil && !errors.As(err, &pe) && !errors.As(err, &unknown) {
				t.Fatalf("%v: untyped error %v", typ, err)
			}
			mine := len(b) > 0 && llc.Type(b[0]&0x0f) == typ && b[0]>>4&^2 == 0
			switch {
			case !mine && err == nil:
				t.Fatalf("%v takes a message that starts with %02x", typ, b[0])
			case mine && (err == nil) != (wantErr == nil):
				t.Fatalf("%v: %v, Parse: %v", typ, err, wantErr)
			case mine && err == nil:
				if diff := cmp.Diff(want, got); diff != "" {
					t.Fatalf("%v (-Parse +this):\n%s", typ, diff)
				}
			}
		}
	})
}

func FuzzParseLLC(f *testing.F) {
	for _, messages := range captures(f) {
		for _, c := range messages {
			f.Add(uint8(llc.DialectLinux), c.version, c.raw)
		}
	}
	for _, m := range samples() {
		f.Add(uint8(dialectOf(m)), llc.Version2, m.Append(nil))
	}
	f.Fuzz(func(t *testing.T, dialect, version uint8, b []byte) {
		d := llc.Dialect(dialect & 1)
		m, err := llc.Parse(d, version, b)
		if err != nil {
			if m != nil {
				t.Fatalf("message %v with error %v", m, err)
			}
			return
		}
		_ = m.String()
		again := m.Append(nil)
		got, err := llc.Parse(d, version, again)
		if err != nil {
			t.Fatalf("%v: encoded and parsed: %v", m, err)
		}
		if diff := cmp.Diff(m, got); diff != "" {
			t.Fatalf("encoded and parsed (-first +second):\n%s", diff)
		}
	})
}

func TestTypeOf(t *testing.T) {
	for name, m := range samples() {
		for n := range 2 { // the type does not need the rest
			if got := llc.TypeOf(m.Append(nil)[:llc.Size>>n]); got != m.Type() {
				t.Errorf("%s: %v, want %v", name, got, m.Type())
			}
		}
	}
	for _, b := range [][]byte{nil, {0xfe}, {0x14}} {
		if got := llc.TypeOf(b); got != 0 {
			t.Errorf("%x is %v", b, got)
		}
	}
}

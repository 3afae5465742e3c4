// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func isParseError(err error) bool {
	var p *ParseError
	return errors.As(err, &p) && !errors.Is(err, ErrDecline)
}

func eid(s string) EID {
	e, ok := NewEID(s)
	if !ok {
		panic("bad EID " + s)
	}
	return e
}

func hostname(s string) (h [32]byte) {
	var x FirstContactExtension
	x.SetHost(s)
	return x.Hostname
}

var (
	macServer = rdma.MAC{0x52, 0x54, 0, 0, 0, 1}
	macClient = rdma.MAC{0x52, 0x54, 0, 0, 0, 2}
)

// The fields of captured messages, checked against the other decoder's words
// in the captures' notes.
func TestCapturedFields(t *testing.T) {
	gid := func(s string) rdma.GID { return rdma.GIDFromAddr(netip.MustParseAddr(s)) }
	tests := []struct {
		name string
		want any
	}{
		{"captured/proposal-40", Proposal{
			Version: 2, V1: ModeR, V2: ModeNone,
			PeerID: NewPeerID(0xa46f, macClient), GID: gid("fe80::5054:ff:fe00:2"), MAC: macClient,
			IPv4: netip.MustParsePrefix("10.0.0.0/24"), HasSMCD: true,
		}},
		{"captured/proposal-01", Proposal{
			Version: 2, V1: ModeNone, V2: ModeR, HasSMCD: true,
			Ext: V2Extension{
				EIDs: ListOf(eid("SMCV2-DEFAULT-UEID")), Release: 1, GID: gid("10.0.0.2"),
				MaxConns: 255, MaxLinks: 2, FeatureMask: 1,
			},
		}},
		{"captured/accept-40", Accept{Endpoint{
			Version: 1, FirstContact: true,
			PeerID: NewPeerID(0x137f, macServer), GID: gid("fe80::5054:ff:fe00:1"), MAC: macServer,
			QPN: 0x11, RKey: 0x356, RMBEIndex: 1, AlertToken: 1, RMBESize: 2, MTU: rdma.MTU1024,
			RMBAddr: 0xffff88803e300000, PSN: 0x693c2c,
		}}},
		{"captured/accept-02", Accept{Endpoint{
			Version: 2,
			PeerID:  NewPeerID(0x0edc, macServer), GID: gid("10.0.0.1"), MAC: macServer,
			QPN: 0x11, RKey: 0x3a4, RMBEIndex: 1, AlertToken: 2, RMBESize: 2, MTU: rdma.MTU1024,
			RMBAddr: 0xffff88803faa0000, PSN: 0xffc5f4, EID: eid("SMCV2-DEFAULT-UEID"),
		}}},
		{"captured/confirm-20", Confirm{
			Endpoint: Endpoint{
				Version: 2, FirstContact: true,
				PeerID: NewPeerID(0x0ffc, macClient), GID: gid("10.0.0.2"), MAC: macClient,
				QPN: 0x11, RKey: 0x358, RMBEIndex: 1, AlertToken: 1, RMBESize: 2, MTU: rdma.MTU1024,
				RMBAddr: 0xffff88803e2e0000, PSN: 0x8ba1ba, EID: eid("SMCV2-DEFAULT-UEID"),
				Ext: FirstContactExtension{
					Direct: true, OS: OSLinux, Release: 1, Hostname: hostname("g2"),
					MaxConns: 255, MaxLinks: 2, FeatureMask: 1,
				},
			},
			GIDs: ListOf(gid("10.0.0.2"), gid("10.0.0.12")),
		}},
		{"captured/decline-11", Decline{
			Version: 1, PeerID: NewPeerID(0xd1bc, macClient), Reason: ReasonNoDev,
		}},
		{"captured/decline-12", Decline{
			Version: 2, PeerID: NewPeerID(0x0edc, macServer), Reason: ReasonNoDev, OS: OSLinux,
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseAny(load(t, tt.name))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, any(got), opts); diff != "" {
				t.Errorf("fields (-want +got):\n%s", diff)
			}
		})
	}
}

// fullProposal has every list full: the longest message.
func fullProposal() Proposal {
	p := Proposal{
		Version: 2, V1: ModeBoth, V2: ModeBoth, PeerID: NewPeerID(7, macClient), MAC: macClient,
		GID: rdma.GID{0xfe, 0x80, 15: 2}, HasSMCD: true,
		SMCD: SMCDArea{GID: 1 << 40, CHID: 9, VendorOUI: [3]byte{1, 2, 3}, VendorOptions: [5]byte{4, 5, 6, 7, 8}},
		Ext:  V2Extension{Release: 1, SEID: true, MaxConns: 255, MaxLinks: 2, FeatureMask: 1, GID: rdma.GID{15: 3}},
	}
	for i := range MaxPrefixes {
		p.IPv6.Add(netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 1, 15: byte(i)}), 64+i))
	}
	for range MaxEIDs {
		p.Ext.EIDs.Add(eid("E"))
	}
	p.SMCDv2.SEID = eid("S")
	for i := range MaxISMGIDs {
		p.SMCDv2.Devices.Add(ISMDevice{GID: 1<<63 + uint64(i), CHID: uint16(0xff00 + i)})
	}
	return p
}

// Layouts that no capture shows: the lengths come from RFC 7609 A.2 and from
// the layouts of Linux.
func TestRoundTrip(t *testing.T) {
	base := Endpoint{
		Version: 1, PeerID: NewPeerID(1, macServer), MAC: macServer, QPN: rdma.MaxQPN, RKey: 0xffffffff,
		RMBEIndex: 255, AlertToken: 0xfffffffe, RMBESize: 15, MTU: rdma.MTU4096, RMBAddr: 1<<64 - 1, PSN: rdma.PSNMask,
	}
	v2 := base
	v2.Version, v2.EID = 2, eid("X")
	fc := v2
	fc.FirstContact = true
	fc.Ext = FirstContactExtension{OS: OSzOS, Release: 1, MaxConns: 16, MaxLinks: 1, FeatureMask: 0x8001, Vendor: [4]byte{1, 2, 3, 4}}
	tests := []struct {
		name string
		msg  interface{ Append([]byte) []byte }
		len  int
	}{
		{"v1 proposal over IPv4 (A.2.2)", Proposal{Version: 1, V2: ModeNone, IPv4: netip.MustParsePrefix("10.1.0.0/16")}, 52},
		{"v1 proposal over IPv6 (A.2.2)", Proposal{Version: 1, V2: ModeNone, IPv6: ListOf(netip.MustParsePrefix("fe80::/64"))}, 69},
		{"v1 proposal, address with host bits", Proposal{Version: 1, V2: ModeNone, IPv4: netip.MustParsePrefix("10.1.2.3/16")}, 52},
		{"v1 proposal of a kernel with SMC-D", Proposal{Version: 1, V1: ModeBoth, V2: ModeNone, IPv4: netip.MustParsePrefix("10.1.0.0/16"), HasSMCD: true, SMCD: SMCDArea{GID: 1}}, 92},
		{"v2 header, nothing offered", Proposal{Version: 2, V1: ModeNone, V2: ModeNone, HasSMCD: true}, 84},
		{"v1 and v2", Proposal{Version: 2, V2: ModeR, IPv4: netip.MustParsePrefix("10.0.0.0/24"), HasSMCD: true, Ext: V2Extension{EIDs: ListOf(eid("A"))}}, 164},
		{"everything", fullProposal(), MaxLen},
		{"v1 accept (A.2.3)", Accept{base}, 68},
		{"v2 accept, subsequent contact", Accept{v2}, 108},
		{"v2 accept, first contact", Accept{fc}, 160},
		{"v1 confirm (A.2.4)", Confirm{Endpoint: base}, 68},
		{"v2 confirm, no GIDs", Confirm{Endpoint: fc}, 164},
		{"v2 confirm, all GIDs", Confirm{Endpoint: fc, GIDs: ListOf(make([]rdma.GID, MaxGIDs)...)}, maxConfirmLen},
		{"v1 decline, S bit (A.2.5)", Decline{Version: 1, OutOfSync: true, Reason: ReasonSyncErr}, 28},
		{"v2 decline", Decline{Version: 2, Reason: ReasonMem, OS: OSAIX, Extra: [4]uint32{1, 2, 3, 4}}, 44},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := tt.msg.Append(nil)
			if len(b) != tt.len {
				t.Errorf("%d bytes, want %d", len(b), tt.len)
			}
			got, err := parseAny(b)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(any(tt.msg), any(got), opts); diff != "" {
				t.Errorf("decoded again (-want +got):\n%s", diff)
			}
		})
	}
}

// RFC 7609 A.2.2: a receiver must skip a growth area it does not know.
func TestUnknownGrowthArea(t *testing.T) {
	p := Proposal{Version: 1, V2: ModeNone, MAC: macClient, IPv4: netip.MustParsePrefix("10.1.0.0/16")}
	b := p.Append(nil)
	grown := append([]byte(nil), b[:propSMCD]...)
	grown = append(grown, 1, 2, 3, 4, 5)
	grown = append(grown, b[propSMCD:]...)
	binary.BigEndian.PutUint16(grown[5:], uint16(len(grown)))
	binary.BigEndian.PutUint16(grown[propIPAreaOff:], 5)
	got, err := ParseProposal(grown)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(p, got, opts); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// RFC 7609 A.2: reserved fields are not validated.
func TestReservedNotValidated(t *testing.T) {
	tests := []struct {
		name string
		offs []int
	}{
		{"captured/proposal-40", []int{60, 79, 85, 86}},
		{"captured/proposal-01", []int{38, 39, 60, 79, 82, 84, 85, 86, 87, 108, 119}},
		{"captured/accept-40", []int{51, 60}},
		{"captured/accept-01", []int{51, 60, 96, 103, 106, 107, 148, 155}},
		{"captured/confirm-01", []int{157, 158, 159}},
		{"captured/decline-12", []int{21, 22, 23}},
	}
	for _, tt := range tests {
		b := load(t, tt.name)
		want, err := parseAny(b)
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range tt.offs {
			b[o] ^= 0xff
		}
		got, err := parseAny(b)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if diff := cmp.Diff(want, got, opts); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
	// The mode bits of a version 1 Accept are among the reserved ones.
	b := load(t, "captured/accept-40")
	b[7] |= 0x07
	if _, err := ParseAccept(b); err != nil {
		t.Errorf("version 1 Accept with reserved bits: %v", err)
	}
}

// mutate returns a captured message with the given bytes at an offset.
func mutate(tb testing.TB, name string, off int, with ...byte) []byte {
	b := load(tb, name)
	copy(b[off:], with)
	return b
}

// RFC 7609 C.6: all parse errors but reserved values end the connection.
func TestParseErrors(t *testing.T) {
	tests := []struct {
		name string
		b    []byte
		off  int
	}{
		{"eye catcher", mutate(t, "captured/accept-40", 0, 0x47), 0},
		{"eye catcher of SMC-D", mutate(t, "captured/accept-40", 3, 0xc4), 0},
		{"eye catchers that differ", mutate(t, "published/proposal-ipv4", 3, 0xc4), 48},
		{"trailer", mutate(t, "captured/accept-40", 67, 0), 64},
		{"trailer of a proposal", mutate(t, "captured/proposal-40", 88, 0), 88},
		{"trailer of a decline", mutate(t, "captured/decline-11", 24, 0), 24},
		{"type 0", mutate(t, "captured/accept-40", 4, 0), 4},
		{"type 5", mutate(t, "captured/accept-40", 4, 5), 4},
		{"version 0", mutate(t, "captured/accept-40", 7, 0x08), 7},
		{"length too small", mutate(t, "captured/accept-40", 5, 0, 8), 5},
		{"length too large", mutate(t, "captured/accept-40", 5, 0xff, 0xff), 5},
		{"v2 length in a v1 accept", mutate(t, "captured/accept-01", 7, 0x18), 5},
		{"v1 length in a v2 accept", mutate(t, "captured/accept-40", 7, 0x28), 5},
		{"first contact without extension", mutate(t, "captured/accept-02", 7, 0x28), 5},
		{"extension without first contact", mutate(t, "captured/accept-01", 7, 0x20), 5},
		{"v1 confirm with v2 length", mutate(t, "captured/confirm-01", 7, 0x18), 5},
		{"more GIDs than bytes", mutate(t, "captured/confirm-01", 156, 2), 5},
		{"fewer GIDs than bytes", mutate(t, "captured/confirm-01", 156, 0), 5},
		{"too many GIDs", mutate(t, "captured/confirm-01", 156, 9), 156},
		{"confirm without a GID list", mutate(t, "captured/confirm-02", 7, 0x28), 5},
		{"v1 decline with v2 length", mutate(t, "captured/decline-12", 7, 0x10), 5},
		{"v2 decline with v1 length", mutate(t, "captured/decline-11", 7, 0x20), 5},
		{"v1 proposal offers nothing", mutate(t, "captured/proposal-40", 7, 0x12), 7},
		{"growth area too long", mutate(t, "captured/proposal-40", 38, 0, 41), 38},
		{"growth area beyond the end", mutate(t, "published/proposal-ipv4", 38, 0, 40), 40},
		{"growth area too short", mutate(t, "captured/proposal-40", 38, 0, 39), 5},
		{"growth area too short for v2", mutate(t, "captured/proposal-40", 38, 0, 0), 5},
		{"v2 offered without its extension", mutate(t, "captured/proposal-40", 7, 0x20), 50},
		{"v2 offered without an SMC-D area", mutate(t, "published/proposal-ipv4", 7, 0x20), 38},
		{"IPv4 mask of 33 bits", mutate(t, "captured/proposal-40", 84, 33), 84},
		{"IPv6 prefix that is not there", mutate(t, "captured/proposal-40", 87, 1), 88},
		{"nine IPv6 prefixes", mutate(t, "captured/proposal-40", 87, 9), 87},
		{"v2 extension elsewhere", mutate(t, "captured/proposal-01", 50, 0, 27), 50},
		{"EID that is not there", mutate(t, "captured/proposal-01", 80, 2), 120},
		{"EID too many", mutate(t, "captured/proposal-01", 80, 0), 5},
		{"nine EIDs", mutate(t, "captured/proposal-01", 80, 9), 80},
		{"nine ISM GIDs", mutate(t, "captured/proposal-01", 81, 9), 81},
		{"SMC-D extension that is not there", mutate(t, "captured/proposal-01", 7, 0x26), 152},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parseAny(tt.b)
			var p *ParseError
			if !errors.As(err, &p) || errors.Is(err, ErrDecline) {
				t.Fatalf("error %v, want a ParseError", err)
			}
			if p.Offset != tt.off {
				t.Errorf("%v: offset %d, want %d", err, p.Offset, tt.off)
			}
		})
	}
	long := Proposal{Version: 1, V2: ModeNone, IPv6: ListOf(netip.MustParsePrefix("fe80::/64"))}.Append(nil)
	long[48+16] = 129
	if _, err := ParseProposal(long); !isParseError(err) {
		t.Errorf("IPv6 prefix of 129 bits: %v", err)
	}
	if _, err := ParseAccept(load(t, "captured/confirm-40")); !isParseError(err) {
		t.Errorf("Confirm where an Accept is expected: %v", err)
	}
}

// take says what comes of a captured Accept, or of a Confirm as the answer to the Accept captured with it, when
// bytes of the message are others.
func take(tb testing.TB, name string, off int, with ...byte) error {
	tb.Helper()
	m, err := parseAny(mutate(tb, name, off, with...))
	c, ok := m.(Confirm)
	if err != nil || !ok {
		return err
	}
	a, err := ParseAccept(load(tb, strings.ReplaceAll(name, "confirm", "accept")))
	if err != nil {
		tb.Fatal(err)
	}
	return CheckConfirm(a, c)
}

// RFC 7609 C.6: reserved values of enumerations are answered with a Decline;
// A.2.3: the MTU is looked at in the first contact exchange only.
func TestReservedValuesDecline(t *testing.T) {
	for mtu := range byte(16) {
		for _, name := range []string{"captured/accept-40", "captured/confirm-40", "captured/accept-01", "captured/confirm-01"} {
			err := take(t, name, 50, 0x20|mtu)
			if valid := mtu >= 1 && mtu <= 5; valid != (err == nil) {
				t.Errorf("%s with MTU %d: %v", name, mtu, err)
			} else if !valid && !errors.Is(err, ErrDecline) {
				t.Errorf("%s with MTU %d: %v does not allow the fallback", name, mtu, err)
			}
		}
		for _, name := range []string{"captured/accept-41", "captured/confirm-41", "captured/accept-02"} {
			if err := take(t, name, 50, 0x20|mtu); err != nil {
				t.Errorf("subsequent contact, %s with MTU %d: %v", name, mtu, err)
			}
		}
	}
	got, err := ParseAccept(mutate(t, "captured/accept-01", 7, 0x29))
	var d *DeclineError
	if !errors.As(err, &d) || d.Reason != ReasonModeUnsupp {
		t.Errorf("SMC-D in a version 2 Accept: %v, want %v", err, ReasonModeUnsupp)
	}
	if got.QPN != 0x11 {
		t.Error("a message to decline is not decoded")
	}
}

func TestRMBESize(t *testing.T) {
	for _, tt := range []struct {
		bytes int
		want  RMBESize
	}{{0, 0}, {1, 0}, {16 << 10, 0}, {16<<10 + 1, 1}, {64 << 10, 2}, {512 << 10, 5}, {2 << 20, 7}, {512 << 20, 15}, {1 << 30, 15}} {
		if got := RMBESizeFor(tt.bytes); got != tt.want {
			t.Errorf("RMBESizeFor(%d) = %d, want %d", tt.bytes, got, tt.want)
		}
	}
	for s := RMBESize(0); s < 16; s++ {
		if want := 1 << (s + 4) * 1024; s.Bytes() != want { // RFC 7609 A.2.3: 2^(x+4) KiB
			t.Errorf("size %d is %d bytes, want %d", s, s.Bytes(), want)
		}
	}
}

func TestRMBEAddr(t *testing.T) {
	tests := []struct {
		name string
		e    Endpoint
		want uint64
		ok   bool
	}{
		{"first", Endpoint{RMBEIndex: 1, RMBAddr: 0x1000}, 0x1000, true},
		{"third of 64 KiB", Endpoint{RMBEIndex: 3, RMBESize: 2, RMBAddr: 0x1000}, 0x21000, true},
		{"index 0", Endpoint{RMBAddr: 0x1000}, 0, false},
		{"last bytes of the address space", Endpoint{RMBEIndex: 1, RMBAddr: 1<<64 - 16<<10}, 1<<64 - 16<<10, true},
		{"wraps at its end", Endpoint{RMBEIndex: 1, RMBAddr: 1<<64 - 16<<10 + 1}, 1<<64 - 16<<10 + 1, false},
		{"wraps before it", Endpoint{RMBEIndex: 2, RMBAddr: 1<<64 - 16<<10}, 0, false},
	}
	for _, tt := range tests {
		if got, ok := tt.e.RMBEAddr(); got != tt.want || ok != tt.ok {
			t.Errorf("%s: %#x, %v, want %#x, %v", tt.name, got, ok, tt.want, tt.ok)
		}
	}
}

// reasons are the diagnosis codes with the names that Linux has for them.
var reasons = map[Reason]string{
	0x01010000: "MEM",
	0x02010000: "TIMEOUT_CL",
	0x02020000: "TIMEOUT_AL",
	0x03000000: "CNFERR",
	0x03010000: "PEERNOSMC",
	0x03020000: "IPSEC",
	0x03030000: "NOSMCDEV",
	0x03030001: "NOSMCDDEV",
	0x03030002: "NOSMCRDEV",
	0x03030003: "NOISM2SUPP",
	0x03030004: "NOV2EXT",
	0x03030005: "NOV2DEXT",
	0x03030006: "NOSEID",
	0x03030007: "NOSMCD2DEV",
	0x03030008: "NOUEID",
	0x03030009: "RELEASEERR",
	0x0303000a: "MAXCONNERR",
	0x0303000b: "MAXLINKERR",
	0x0303000c: "VENDORERR",
	0x03040000: "MODEUNSUPP",
	0x03050000: "RMBE_EC",
	0x03060000: "OPTUNSUPP",
	0x03070000: "DIFFPREFIX",
	0x03080000: "GETVLANERR",
	0x03090000: "ISMVLANERR",
	0x030a0000: "NOACTLINK",
	0x030b0000: "NOSRVLINK",
	0x030c0000: "VERSMISMAT",
	0x030d0000: "MAX_DMB",
	0x030e0000: "NOROUTE",
	0x030f0000: "NOINDIRECT",
	0x04000000: "SYNCERR",
	0x05000000: "PEERDECL",
	0x09990000: "INTERR",
	0x09990001: "ERR_RTOK",
	0x09990002: "ERR_RDYLNK",
	0x09990003: "ERR_REGBUF",
	0x09990004: "CREDITSERR",
}

func TestReasons(t *testing.T) {
	texts := map[string]Reason{}
	for r, name := range reasons {
		if got := r.String(); got != name {
			t.Errorf("Reason(%08x) = %s, want %s", uint32(r), got, name)
		}
		if o, dup := texts[r.Text()]; dup || r.Text() == "" {
			t.Errorf("%v and %v have the text %q", o, r, r.Text())
		}
		texts[r.Text()] = r
	}
	if r := Reason(0x12345678); r.Known() || r.String() != "0x12345678" || r.Text() == "" {
		t.Errorf("unknown code: %v, %q", r, r.Text())
	}
}

// Every reason reaches the peer, in both versions of the message.
func TestDeclineCarriesEveryReason(t *testing.T) {
	for r := range reasons {
		for version := V1; version <= V2; version++ {
			s := NewServer(epoch, Config{})
			d := Decline{Version: version, PeerID: NewPeerID(1, macClient), Reason: r, OutOfSync: r == ReasonSyncErr}
			if left, err := feed(s, epoch, d.Append(nil)); len(left) > 0 || err != nil {
				t.Errorf("%v, version %d: %v", r, version, err)
			}
			want := Declined{Reason: r, FromPeer: true, OutOfSync: r == ReasonSyncErr, PeerID: d.PeerID}
			if outs := s.Poll(nil); len(outs) != 1 || outs[0].Declined != want {
				t.Errorf("%v, version %d: %+v, want %+v", r, version, outs, want)
			}
		}
	}
}

// RFC 7609 §3.5.1.2: in version 1 both must be in the same IP subnet.
func TestMatchesPrefix(t *testing.T) {
	prefixes := func(s ...string) (p []netip.Prefix) {
		for _, x := range s {
			p = append(p, netip.MustParsePrefix(x))
		}
		return p
	}
	v4 := Proposal{IPv4: netip.MustParsePrefix("10.0.1.0/24")}
	v4first := Proposal{IPv4: netip.MustParsePrefix("10.0.0.0/24")} // its address is that of the /16, too
	v6 := Proposal{IPv6: ListOf(prefixes("fd00:1::/64", "fd00:2::/64")...)}
	tests := []struct {
		name  string
		p     Proposal
		local string
		ours  []netip.Prefix
		want  bool
	}{
		{"IPv4 same subnet", v4, "10.0.1.7", prefixes("192.168.0.1/24", "10.0.1.7/24"), true},
		{"IPv4 mapped", v4, "::ffff:10.0.1.7", prefixes("10.0.1.7/24"), true},
		{"IPv4 other subnet", v4, "10.0.2.7", prefixes("10.0.2.7/24"), false},
		{"IPv4 other length", v4, "10.0.1.7", prefixes("10.0.1.7/16"), false},
		{"IPv4 longer, first subnet", v4first, "10.0.0.7", prefixes("10.0.0.7/16"), false},
		{"IPv4 shorter, first subnet", v4first, "10.0.0.7", prefixes("10.0.0.7/28"), false},
		{"IPv4 same first subnet", v4first, "10.0.0.7", prefixes("10.0.0.7/24"), true},
		{"IPv4 none of ours", v4, "10.0.1.7", nil, false},
		{"IPv4 connection, IPv6 proposal", v6, "10.0.1.7", prefixes("10.0.1.7/24"), false},
		{"IPv6 second prefix", v6, "fd00:2::7", prefixes("fd00:2::7/64"), true},
		{"IPv6 host prefix", v6, "fd00:2::7", prefixes("fd00:2::7/128"), true},
		{"IPv6 other", v6, "fd00:3::7", prefixes("fd00:3::7/64"), false},
		{"IPv6 connection, IPv4 proposal", v4, "fd00:1::7", prefixes("fd00:1::7/64"), false},
	}
	for _, tt := range tests {
		if got := tt.p.MatchesPrefix(netip.MustParseAddr(tt.local), tt.ours); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestPeerID(t *testing.T) {
	p := NewPeerID(0xd1bc, macClient)
	if p.Instance() != 0xd1bc || p.MAC() != macClient || p.IsZero() || p.String() != "d1bc@52:54:00:00:00:02" {
		t.Errorf("peer ID %v", p)
	}
}

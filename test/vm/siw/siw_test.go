// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

const (
	// caseTimeout bounds one run of a program in a guest that may share a core.
	caseTimeout = 2 * time.Minute

	// firstPort is the port of the first server. Each server has its own: the kernel takes a while
	// to let go of one.
	firstPort = 7200
)

func TestSIW(t *testing.T) {
	testenv.Need(t, testenv.NetAdmin)
	testenv.Need(t, testenv.Tshark)
	// The MTU is what most networks have, so that a message of 4,000 bytes is three segments.
	l := lab.ForTest(t, lab.Config{Guests: 1, NICs: 1, MTU: 1500})
	b := &bed{lab: l, guest: l.Guest(0), port: firstPort}
	err := b.guest.LoadSIW(t.Context(), defaults()...)
	if err == nil {
		err = b.guest.AddSIW(t.Context(), 0)
	}
	if err == nil {
		b.host, err = l.Join(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.host.Close(); err != nil {
			t.Error(err)
		}
	})
	if b.dev, err = softiwarp.Open(softiwarp.Config{Name: "iw0", Addr: b.host.Addr()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.dev.Close(); err != nil {
			t.Error(err)
		}
	})
	stop := b.capture(t)
	t.Run("frames", b.testFrames)
	t.Run("programs", b.testPrograms)
	t.Run("perftest", b.testPerftest)
	t.Run("connect", b.testConnect)
	t.Run("private data", b.testPrivateData)
	t.Run("rights", b.testRights)
	t.Run("ends", b.testEnds)
	t.Run("suite", b.testSuite)
	t.Run("SDP", b.testSDP)
	t.Run("port mapper", b.testPortMapper)
	t.Run("capture", func(t *testing.T) { b.testCapture(t, stop()) })
	t.Run("demo", b.testDemo) // whose MiBs say nothing new to tshark
}

// A bed is the guest with siw, and what a test needs to talk to programs there.
type bed struct {
	lab   *lab.Lab
	guest *lab.Guest
	host  *lab.Host         // this machine
	dev   *softiwarp.Device // on it
	port  int               // of the server before

	badCRCs int // FPDUs that tests have spoilt
}

// settings are siw's parameters.
type settings map[string]string

// defaults are the settings that Linux has, as [lab.Guest.LoadSIW] takes them.
func defaults() []string {
	var all []string
	for name, value := range linuxHas() {
		all = append(all, name+"="+value)
	}
	return all
}

func linuxHas() settings {
	return settings{"mpa_crc_required": "0", "mpa_crc_strict": "0", "peer_to_peer": "0", "mpa_version": "2"}
}

// set gives siw settings until the test ends.
func (b *bed) set(t *testing.T, s settings) {
	t.Helper()
	write := func(ctx context.Context, value func(name string) string) error {
		var script strings.Builder
		script.WriteString("cd /sys/module/siw/parameters\n")
		for name := range s {
			fmt.Fprintf(&script, "echo %s >%s\n", value(name), name)
		}
		_, err := b.guest.Shell(ctx, script.String())
		return err
	}
	if err := write(t.Context(), func(name string) string { return s[name] }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // t.Context is over by then
		if err := write(context.WithoutCancel(t.Context()), func(name string) string { return linuxHas()[name] }); err != nil {
			t.Error(err)
		}
	})
}

// A program runs in the guest.
type program struct{ *lab.Process }

// start starts a program. It is killed with the test if it has not ended.
func (b *bed) start(t *testing.T, command ...string) *program {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), caseTimeout)
	p, err := b.guest.Start(ctx, command...)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		<-p.Done()
	})
	return &program{Process: p}
}

// said waits for the end of the program and returns how it ended, and what it said.
func (p *program) said() (string, error) {
	var out bytes.Buffer
	err := p.Stream(nil, &out, &out)
	return out.String(), err
}

// done waits for the end of the program, which is to be a good one.
func (p *program) done(t *testing.T) string {
	t.Helper()
	out, err := p.said()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	return out
}

// serve starts a server in the guest and returns its address.
func (b *bed) serve(t *testing.T, command ...string) (*program, netip.AddrPort) {
	t.Helper()
	b.port++
	port := strconv.Itoa(b.port)
	p := b.start(t, append(command, "-p", port)...)
	// siw listens with a socket of the kernel.
	if _, err := b.guest.Shell(t.Context(), "until ss -Hltn sport = :"+port+" | grep -q .; do sleep 0.02; done"); err != nil {
		t.Fatalf("wait for the server at port %s: %v", port, err)
	}
	return p, netip.AddrPortFrom(b.guest.Addr(0), uint16(b.port))
}

// inNS does f where the sockets of our device belong.
func (b *bed) inNS(t *testing.T, f func() error) error {
	t.Helper()
	return b.host.NetNS().Do(f)
}

// limited is the context of one step.
func limited(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), caseTimeout)
	t.Cleanup(cancel)
	return ctx
}

// listen has our device listen.
func (b *bed) listen(t *testing.T) *softiwarp.Listener {
	t.Helper()
	var l *softiwarp.Listener
	err := b.inNS(t, func() (err error) {
		l, err = b.dev.Listen(":0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// portOf is what the programs are told of a listener.
func portOf(l *softiwarp.Listener) string { return strconv.Itoa(l.Addr().(*net.TCPAddr).Port) }

// A peer is our side of a connection with a program, with receives for its messages.
type peer struct {
	*rdmatest.End
	slots int
	bytes int // of a slot
}

// The region of a peer begins with what it sends; behind it are the slots of its receives, and
// from bulk on it is the test's.
const (
	regionBytes = 4 << 20
	bulk        = 3 << 20
	maxSlots    = 16
)

// newPeer makes a peer in INIT, with that many receives of messages of some size.
func (b *bed) newPeer(t *testing.T, slots, sizeBytes int) *peer {
	t.Helper()
	p := &peer{
		End:   rdmatest.NewEnd(t, b.dev, rdmatest.Options{MRBytes: regionBytes}),
		slots: min(slots, maxSlots), bytes: sizeBytes,
	}
	if (p.slots+1)*sizeBytes > bulk {
		t.Fatalf("%d messages of %d bytes are too much", slots, sizeBytes)
	}
	p.Init(t)
	for i := range p.slots {
		p.Recv(t, uint64(i), (i+1)*sizeBytes, sizeBytes)
	}
	return p
}

// receive waits for a message.
func (p *peer) receive(t *testing.T) []byte {
	t.Helper()
	w := rdmatest.Await(t, p.RecvCQ, 1)[0]
	if w.Status != rdma.StatusSuccess {
		t.Fatalf("a receive ends with %v", w.Status)
	}
	at := int(w.ID+1) * p.bytes
	in := bytes.Clone(p.MR.Bytes()[at : at+int(w.Bytes)])
	p.Recv(t, w.ID, at, p.bytes)
	return in
}

// send sends a message.
func (p *peer) send(t *testing.T, b []byte) {
	t.Helper()
	p.post(t, rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{p.SGE(0, copy(p.MR.Bytes(), b))}})
}

// post does one request.
func (p *peer) post(t *testing.T, w rdma.SendWR) {
	t.Helper()
	w.Flags |= rdma.SendSignaled
	p.Send(t, w)
	if got := rdmatest.Await(t, p.SendCQ, 1)[0]; got.Status != rdma.StatusSuccess {
		t.Fatalf("%v ends with %v", w.Op, got.Status)
	}
}

// dial connects a peer to a server.
func (b *bed) dial(t *testing.T, p *peer, to netip.AddrPort, o softiwarp.ConnectOptions) {
	t.Helper()
	if err := b.tryDial(t, p, to, o); err != nil {
		t.Fatal(err)
	}
}

func (b *bed) tryDial(t *testing.T, p *peer, to netip.AddrPort, o softiwarp.ConnectOptions) error {
	t.Helper()
	return b.inNS(t, func() error {
		_, err := b.dev.Dial(limited(t), p.QP, to.String(), o)
		return err
	})
}

// request waits for a client.
func request(t *testing.T, l *softiwarp.Listener) *softiwarp.Request {
	t.Helper()
	r, err := l.Accept(limited(t))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// accept connects a peer to the next client.
func accept(t *testing.T, l *softiwarp.Listener, p *peer, o softiwarp.ConnectOptions) {
	t.Helper()
	if err := request(t, l).Accept(limited(t), p.QP, o); err != nil {
		t.Fatal(err)
	}
}

// disconnect ends a connection, whose other end then does, too. siw has a SEND fail, though it
// was sent, if the connection ends at once: where a program minds, it is the one to end it.
func (b *bed) disconnect(t *testing.T, p *peer) {
	t.Helper()
	if err := b.dev.Disconnect(p.QP); err != nil {
		t.Error(err)
	}
}

// disconnected waits until the other end has ended a connection in order.
func (p *peer) disconnected(t *testing.T) {
	t.Helper()
	if e := rdmatest.AwaitEvent(t, p.Ctx, rdma.EventDisconnected); e.QPN != p.QP.Num() {
		t.Errorf("event %+v, want one of queue pair %v", e, p.QP.Num())
	}
}

// capture records what is on the wire until stop is called.
func (b *bed) capture(t *testing.T) (stop func() string) {
	t.Helper()
	end, err := b.lab.Capture("siw")
	if err != nil {
		t.Fatal(err)
	}
	return func() string {
		t.Helper()
		pcap, err := end()
		if err != nil {
			t.Fatal(err)
		}
		return pcap
	}
}

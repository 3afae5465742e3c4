// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// wr is a signaled work request of n bytes.
func (b *bench) wr(id uint64, op rdma.Opcode, n int) rdma.SendWR {
	return rdma.SendWR{
		ID: id, Op: op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{b.mr.sge(0, n)},
		RemoteAddr: 9 << 40, RKey: 5, Imm: 0xfeed,
	}
}

func TestRequester_packets(t *testing.T) {
	tests := []struct {
		name string
		op   rdma.Opcode
		n    int
		want []string
	}{
		{"empty SEND", rdma.OpSend, 0, []string{"SEND Only 0 SE A"}},
		{"SEND", rdma.OpSend, 44, []string{"SEND Only 0 44 bytes SE A"}},
		{"SEND of one MTU", rdma.OpSend, 256, []string{"SEND Only 0 256 bytes SE A"}},
		{"SEND of three", rdma.OpSend, 513, []string{"SEND First 0 256 bytes", "SEND Middle 1 256 bytes", "SEND Last 2 1 bytes SE A"}},
		{"WRITE", rdma.OpWrite, 5, []string{"RDMA WRITE Only 0 to +0 len 5 5 bytes SE A"}},
		{"WRITE of three", rdma.OpWrite, 768, []string{
			"RDMA WRITE Only 0 to +0 len 256 256 bytes", "RDMA WRITE Only 1 to +256 len 256 256 bytes",
			"RDMA WRITE Only 2 to +512 len 256 256 bytes SE A",
		}},
		{"WRITE with immediate", rdma.OpWriteImm, 5, []string{"RDMA WRITE Only with Immediate 0 to +0 len 5 5 bytes imm 0xfeed SE A"}},
		{"WRITE with immediate of two", rdma.OpWriteImm, 257, []string{
			"RDMA WRITE First 0 to +0 len 257 256 bytes", "RDMA WRITE Last with Immediate 1 1 bytes imm 0xfeed SE A",
		}},
		{"READ", rdma.OpRead, 600, []string{"RDMA READ Request 0 to +0 len 600 A"}},
		// The window of 64 packets, in requests of 16.
		{"long READ", rdma.OpRead, 40 * 256, []string{
			"RDMA READ Request 0 to +0 len 4096 A", "RDMA READ Request 16 to +4096 len 4096 A", "RDMA READ Request 32 to +8192 len 2048 A",
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, nil)
			w := b.wr(1, tt.op, tt.n)
			w.Flags |= rdma.SendSolicited
			b.send(w)
			b.wantOut(tt.want...)
			b.wantOut()
		})
	}
}

func TestRequester_gathers(t *testing.T) {
	b := newBench(t, nil)
	for i := range b.mr.buf[:1024] {
		b.mr.buf[i] = byte(i * 7)
	}
	b.send(rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{b.mr.sge(0, 1), {}, b.mr.sge(500, 300)}})
	var tx [2]TxPacket
	if n := b.q.PollTx(b.now, tx[:]); n != 2 {
		t.Fatalf("%d packets", n)
	}
	var got []byte
	for i := range tx {
		for _, s := range tx[i].Payload[:tx[i].Segs] {
			got = append(got, s...)
		}
	}
	want := append([]byte{b.mr.buf[0]}, b.mr.buf[500:800]...)
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if &tx[0].Payload[1][0] != &b.mr.buf[500] {
		t.Error("payload is a copy")
	}
}

func TestRequester_inlineIsCopied(t *testing.T) {
	b := newBench(t, nil)
	data := []byte("hello")
	b.send(rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendInline, Inline: data})
	copy(data, "?????")
	var tx [1]TxPacket
	b.q.PollTx(b.now, tx[:])
	if got := string(tx[0].Payload[0]); got != "hello" {
		t.Errorf("sent %q", got)
	}
}

func TestRequester_ackRequests(t *testing.T) {
	b := newBench(t, nil)
	w := b.wr(1, rdma.OpWrite, 8)
	w.Flags = 0
	b.send(w, w, w)
	b.wantOut( // only the last one's answer is waited for
		"RDMA WRITE Only 0 to +0 len 8 8 bytes", "RDMA WRITE Only 1 to +0 len 8 8 bytes", "RDMA WRITE Only 2 to +0 len 8 8 bytes A")
	b.in(Acknowledge, 2, ackPacket)
	b.wantWC()
	b.send(b.wr(2, rdma.OpWrite, 100*256))
	got := b.out()
	if len(got) != 64 {
		t.Fatalf("%d packets in flight, window is 64", len(got))
	}
	for i, s := range got {
		if want := i%16 == 15; strings.HasSuffix(s, " A") != want {
			t.Errorf("packet %d: %s", i, s)
		}
	}
	b.in(Acknowledge, 3+15, ackPacket)
	if got := b.out(); len(got) != 16 {
		t.Errorf("%d packets after 16 were acknowledged", len(got))
	}
}

// TestRequester_opensTheWindow: few packets before the first answer, then
// twice as many with each round trip; half after a loss, then slowly.
func TestRequester_opensTheWindow(t *testing.T) {
	b := newBench(t, func(c *QPConfig, _ *rdma.QPAttr) { c.Window = 128 })
	b.q.req.cwnd.size = initialCwnd
	w := b.wr(1, rdma.OpWrite, 1<<16) // of 256 packets, thrice
	w.SGL = append(w.SGL, w.SGL[0], w.SGL[0])
	b.send(w)
	sent := 0
	for _, want := range []int{32, 64, 128, 128} {
		got := len(b.out())
		if sent += got; got != want {
			t.Errorf("%d packets in flight, want %d", got, want)
		}
		b.in(Acknowledge, sent-1, ackPacket)
	}
	sent += len(b.out())
	b.in(Acknowledge, sent-128, aeth(SyndromeNAK(NAKSequence)))
	for _, want := range []int{64, 65, 66} {
		got := len(b.out())
		if got != want {
			t.Errorf("%d packets in flight after a loss, want %d", got, want)
		}
		b.in(Acknowledge, sent-129+got, ackPacket)
		sent += got
	}
}

func TestRequester_completesInOrder(t *testing.T) {
	b := newBench(t, nil)
	quiet := b.wr(2, rdma.OpSend, 1)
	quiet.Flags = 0
	b.send(b.wr(1, rdma.OpWrite, 300), quiet, b.wr(3, rdma.OpSend, 1), b.wr(4, rdma.OpSend, 1))
	b.out()
	b.in(Acknowledge, 0, ackPacket) // middle of the first
	b.wantWC()
	b.in(Acknowledge, 3, ackPacket)
	b.wantWC("1 RDMA_WRITE success 300", "3 SEND success 1")
	b.in(Acknowledge, 1, ackPacket) // old
	b.in(Acknowledge, 5, ackPacket) // never sent
	b.wantWC()
	if g := b.q.Stats().Ghosts; g != 2 {
		t.Errorf("%d ghosts", g)
	}
	b.in(Acknowledge, 4, ackPacket)
	b.wantWC("4 SEND success 1")
	if _, ok := b.q.NextTimeout(); ok {
		t.Error("timer runs with nothing outstanding")
	}
}

func TestRequester_goBackOnNAK(t *testing.T) {
	b := newBench(t, nil)
	b.send(b.wr(1, rdma.OpSend, 1), b.wr(2, rdma.OpSend, 600), b.wr(3, rdma.OpSend, 1))
	b.out()
	b.in(Acknowledge, 2, aeth(SyndromeNAK(NAKSequence)))
	b.wantWC("1 SEND success 1")
	b.wantOut("SEND Middle 2 256 bytes A", "SEND Last 3 88 bytes A", "SEND Only 4 1 bytes A")
	b.in(Acknowledge, 2, aeth(SyndromeNAK(NAKSequence))) // again: what is in flight answers
	b.wantOut()
	b.in(Acknowledge, 4, ackPacket)
	b.wantWC("2 SEND success 600", "3 SEND success 1")
}

func TestRequester_ackAfterGoBack(t *testing.T) {
	b := newBench(t, nil)
	b.send(b.wr(1, rdma.OpSend, 600), b.wr(2, rdma.OpSend, 1))
	b.out()
	b.in(Acknowledge, 0, aeth(SyndromeNAK(NAKSequence)))
	b.in(Acknowledge, 2, ackPacket) // the NAK was old
	b.wantWC("1 SEND success 600")
	b.wantOut("SEND Only 3 1 bytes A")
}

func TestRequester_fatalNAK(t *testing.T) {
	tests := []struct {
		code NAKCode
		want string
	}{
		{NAKInvalidRequest, "2 SEND remote invalid request error"},
		{NAKRemoteAccess, "2 SEND remote access error"},
		{NAKRemoteOp, "2 SEND remote operation error"},
	}
	for _, tt := range tests {
		t.Run(tt.code.String(), func(t *testing.T) {
			b := newBench(t, nil)
			b.recv(8)
			quiet := b.wr(2, rdma.OpSend, 300) // errors complete unsignaled ones too
			quiet.Flags = 0
			b.send(b.wr(1, rdma.OpSend, 1), quiet, b.wr(3, rdma.OpSend, 1))
			b.out()
			b.in(Acknowledge, 2, aeth(SyndromeNAK(tt.code)))
			b.wantWC("1 SEND success 1", tt.want, "3 SEND work request flushed", "100 RECV work request flushed")
			b.wantState(rdma.QPError)
			b.wantOut()
		})
	}
}

func TestRequester_reservedSyndromesAreDropped(t *testing.T) {
	b := newBench(t, nil)
	b.send(b.wr(1, rdma.OpSend, 1))
	b.out()
	for _, s := range []Syndrome{0x40, 0x80, 0xa0, 0xc0, 0xe0, SyndromeNAK(4), SyndromeNAK(31)} {
		b.in(Acknowledge, 0, aeth(s))
	}
	b.wantWC()
	b.wantState(rdma.QPRTS)
	if got := b.q.Stats().Bad; got != 7 {
		t.Errorf("%d bad packets counted", got)
	}
}

func TestRequester_rnrWaits(t *testing.T) {
	b := newBench(t, nil)
	b.send(b.wr(1, rdma.OpSend, 1), b.wr(2, rdma.OpSend, 1))
	b.out()
	b.in(Acknowledge, 1, aeth(SyndromeRNR(20))) // 10.24 ms
	b.wantWC("1 SEND success 1")
	b.in(Acknowledge, 1, aeth(SyndromeRNR(20))) // a copy
	b.wantOut()
	if d := b.expire(); d != 10240*time.Microsecond {
		t.Errorf("waited %v", d)
	}
	b.wantOut("SEND Only 1 1 bytes A")
	b.in(Acknowledge, 1, ackPacket)
	b.wantWC("2 SEND success 1")
}

func TestRequester_rnrRetries(t *testing.T) {
	for _, tt := range []struct {
		retries uint8
		rounds  int
	}{{0, 0}, {3, 3}, {7, 100}} {
		t.Run(fmt.Sprint(tt.retries), func(t *testing.T) {
			b := newBench(t, func(_ *QPConfig, a *rdma.QPAttr) { a.RNRRetry = tt.retries })
			b.send(b.wr(1, rdma.OpSend, 1))
			b.out()
			for range tt.rounds {
				b.in(Acknowledge, 0, aeth(SyndromeRNR(1)))
				b.wantState(rdma.QPRTS)
				b.expire()
				b.wantOut("SEND Only 0 1 bytes A")
			}
			if tt.retries == rnrForever {
				return
			}
			b.in(Acknowledge, 0, aeth(SyndromeRNR(1)))
			b.wantWC("1 SEND RNR retry counter exceeded")
			b.wantState(rdma.QPError)
		})
	}
}

func TestRequester_timeoutRetries(t *testing.T) {
	b := newBench(t, nil) // 2 retries
	b.send(b.wr(1, rdma.OpSend, 600), b.wr(2, rdma.OpSend, 1))
	b.out()
	for _, factor := range []time.Duration{1, 2} {
		if d := b.expire(); d != factor*rdma.ACKTimeout(14) {
			t.Errorf("timeout after %v", d)
		}
		b.wantOut("SEND First 0 256 bytes A") // one packet asks what arrived
	}
	if d := b.expire(); d != 4*rdma.ACKTimeout(14) {
		t.Errorf("last timeout after %v", d)
	}
	b.wantWC("1 SEND transport retry counter exceeded", "2 SEND work request flushed")
	if ev, ok := b.q.PollEvent(); !ok || ev.Kind != rdma.EventPathDown || !errors.Is(ev.Err, errTimeout) {
		t.Errorf("event %+v", ev)
	}
	if _, ok := b.q.NextTimeout(); ok {
		t.Error("timer runs in ERR")
	}
}

func TestRequester_progressRenewsRetries(t *testing.T) {
	b := newBench(t, nil)
	b.send(b.wr(1, rdma.OpSend, 256*10))
	b.out()
	for i := range 5 {
		b.expire()
		b.out()
		b.expire()
		b.out()
		b.in(Acknowledge, i, ackPacket)
		b.out()
	}
	b.wantState(rdma.QPRTS)
}

func TestRequester_noTimerWithoutTimeout(t *testing.T) {
	b := newBench(t, func(_ *QPConfig, a *rdma.QPAttr) { a.Timeout = 0 })
	b.send(b.wr(1, rdma.OpSend, 1))
	b.out()
	if _, ok := b.q.NextTimeout(); ok {
		t.Error("timer runs")
	}
}

func TestRequester_probesBeforeTheTimeout(t *testing.T) {
	b := newBench(t, nil)
	b.send(b.wr(1, rdma.OpSend, 1))
	b.out()
	b.now = b.now.Add(100 * time.Microsecond)
	b.in(Acknowledge, 0, ackPacket) // the round trip is known now
	b.send(b.wr(2, rdma.OpSend, 600))
	b.out()
	for want := minProbe; want < 40*time.Millisecond; want *= 2 {
		if d := b.expire(); d != want {
			t.Errorf("probe after %v, want %v", d, want)
		}
		b.wantOut("SEND First 1 256 bytes A")
	}
	if got := b.q.Stats(); got.Probes != 3 || got.Timeouts != 0 {
		t.Errorf("%+v", got)
	}
	if d := b.expire(); d != rdma.ACKTimeout(14)-(5+10+20)*time.Millisecond {
		t.Errorf("timeout %v after the last probe", d)
	}
	b.out()
	b.in(Acknowledge, 1, ackPacket)
	b.wantOut("SEND Middle 2 256 bytes", "SEND Last 3 88 bytes A")
}

// TestRequester_probeOfSlowPeer: the answer to the probe acknowledges more
// than the probe, so that the rest of the window is still on its way.
func TestRequester_probeOfSlowPeer(t *testing.T) {
	b := newBench(t, nil)
	b.send(b.wr(1, rdma.OpSend, 1))
	b.out()
	b.in(Acknowledge, 0, ackPacket)
	b.send(b.wr(2, rdma.OpSend, 600), b.wr(3, rdma.OpSend, 1), b.wr(4, rdma.OpSend, 600))
	b.out()
	b.expire()
	b.wantOut("SEND First 1 256 bytes A")
	b.in(Acknowledge, 3, ackPacket)
	b.wantOut()
	b.wantWC("1 SEND success 1", "2 SEND success 600")
	b.send(b.wr(5, rdma.OpSend, 1))
	b.wantOut("SEND Only 8 1 bytes A")
	b.in(Acknowledge, 8, ackPacket)
	b.wantWC("3 SEND success 1", "4 SEND success 600", "5 SEND success 1")
}

// TestRequester_probeAmidRepetition: what the peer has said that it misses is sent again, whatever a probe on the way
// is answered with.
func TestRequester_probeAmidRepetition(t *testing.T) {
	b := newBench(t, nil)
	b.send(b.wr(1, rdma.OpSend, 1))
	b.out()
	b.in(Acknowledge, 0, ackPacket)
	b.send(b.wr(2, rdma.OpSend, 600), b.wr(3, rdma.OpSend, 600))
	b.out()
	b.in(Acknowledge, 1, func(p *Packet) { p.AETH.Syndrome = SyndromeNAK(NAKSequence) })
	var one [1]TxPacket
	if n := b.q.PollTx(b.now, one[:]); n != 1 { // the wire is full then
		t.Fatal("nothing is sent again")
	}
	b.expire()
	b.wantOut("SEND First 1 256 bytes A")
	b.in(Acknowledge, 2, ackPacket) // the peer had that, too
	b.wantOut("SEND Last 3 88 bytes A", "SEND First 4 256 bytes", "SEND Middle 5 256 bytes", "SEND Last 6 88 bytes A")
}

func resp(n int) func(*Packet) {
	return func(p *Packet) { ackPacket(p); p.Payload = []byte(strings.Repeat("r", n)) }
}

func TestRequester_read(t *testing.T) {
	b := newBench(t, nil)
	b.send(b.wr(1, rdma.OpSend, 1), b.wr(2, rdma.OpRead, 600), b.wr(3, rdma.OpSend, 1))
	b.out()
	b.in(ReadRespFirst, 1, resp(256)) // acknowledges the SEND too
	b.wantWC("1 SEND success 1")
	b.in(ReadRespMiddle, 2, resp(256))
	b.in(ReadRespLast, 3, resp(88))
	b.wantWC("2 RDMA_READ success 600")
	if got := string(b.mr.buf[:601]); got != strings.Repeat("r", 600)+"\x00" {
		t.Error("wrong bytes read")
	}
	b.in(Acknowledge, 4, ackPacket)
	b.wantWC("3 SEND success 1")
}

func TestRequester_lostReadResponse(t *testing.T) {
	tests := []struct {
		name string
		do   func(b *bench)
	}{
		{"next response", func(b *bench) { b.in(ReadRespLast, 2, resp(88)) }},
		{"ACK beyond", func(b *bench) { b.in(Acknowledge, 3, ackPacket) }},
		{"NAK", func(b *bench) { b.in(Acknowledge, 1, aeth(SyndromeNAK(NAKSequence))) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, nil)
			b.send(b.wr(1, rdma.OpRead, 600), b.wr(2, rdma.OpSend, 1))
			b.out()
			b.in(ReadRespFirst, 0, resp(256))
			tt.do(b)
			b.wantWC()
			b.wantOut("RDMA READ Request 1 to +256 len 344 A", "SEND Only 3 1 bytes A")
			b.in(ReadRespFirst, 1, resp(256))
			b.in(ReadRespLast, 2, resp(88))
			b.in(Acknowledge, 3, ackPacket)
			b.wantWC("1 RDMA_READ success 600", "2 SEND success 1")
		})
	}
}

func TestRequester_badReadResponses(t *testing.T) {
	b := newBench(t, nil)
	b.send(b.wr(1, rdma.OpRead, 600))
	b.out()
	b.in(ReadRespFirst, 0, resp(200))                      // not the MTU
	b.in(ReadRespOnly, 0, resp(257))                       // longer
	b.in(ReadRespFirst, 3, resp(256))                      // beyond the READ
	b.in(ReadRespFirst, 0, aeth(SyndromeNAK(NAKSequence))) // not an ACK
	b.in(AtomicAck, 0, func(p *Packet) { p.Ext = make([]byte, 8) })
	b.wantWC()
	b.wantState(rdma.QPRTS)
	if b.mr.buf[0] != 0 {
		t.Error("memory written")
	}
	b.in(ReadRespFirst, 0, resp(256))
	b.mr.gone = true
	b.q.ForgetMemory(time.Time{})
	b.in(ReadRespMiddle, 1, resp(256))
	b.wantWC("1 RDMA_READ local protection error")
	b.wantState(rdma.QPError)
}

func TestRequester_readsAreLimited(t *testing.T) {
	b := newBench(t, func(c *QPConfig, _ *rdma.QPAttr) { c.MaxSendWR = 2 * MaxReads })
	for i := range MaxReads + 1 {
		b.send(b.wr(uint64(i), rdma.OpRead, 8))
	}
	if got := len(b.out()); got != MaxReads {
		t.Errorf("%d READ requests in flight", got)
	}
	b.in(ReadRespOnly, 0, resp(8))
	if got := len(b.out()); got != 1 {
		t.Errorf("%d READ requests after one was answered", got)
	}
}

func TestRequester_localProtection(t *testing.T) {
	tests := []struct {
		name string
		edit func(b *bench, w *rdma.SendWR)
	}{
		{"unknown lkey", func(_ *bench, w *rdma.SendWR) { w.SGL[0].LKey = 99 }},
		{"beyond region", func(_ *bench, w *rdma.SendWR) { w.SGL[0].Length = 1<<16 + 1 }},
		{"read into read-only", func(b *bench, w *rdma.SendWR) {
			w.Op = rdma.OpRead
			w.SGL[0] = b.mem.add(100, rdma.RemoteRead).sge(0, 10)
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, nil)
			bad := b.wr(2, rdma.OpWrite, 8)
			tt.edit(b, &bad)
			quiet := b.wr(1, rdma.OpSend, 4)
			quiet.Flags = 0
			b.send(b.wr(0, rdma.OpSend, 4), quiet, bad, b.wr(3, rdma.OpSend, 4))
			// The one before goes out again, because its answer was not asked for.
			b.wantOut("SEND Only 0 4 bytes A", "SEND Only 1 4 bytes", "SEND Only 1 4 bytes A")
			b.wantWC()
			b.in(Acknowledge, 1, ackPacket)
			b.wantOut()
			b.wantWC("0 SEND success 4", fmt.Sprintf("2 %v local protection error", bad.Op), "3 SEND work request flushed")
			b.wantState(rdma.QPError)
		})
	}
}

func TestPostSend_errors(t *testing.T) {
	b := newBench(t, nil)
	tests := []struct {
		name string
		wr   rdma.SendWR
		want error
	}{
		{"no operation to send", rdma.SendWR{Op: rdma.OpRecv}, rdma.ErrInvalid},
		{"too many SGEs", rdma.SendWR{SGL: make([]rdma.SGE, 4)}, rdma.ErrInvalid},
		{"READ into two", rdma.SendWR{Op: rdma.OpRead, SGL: make([]rdma.SGE, 2)}, rdma.ErrInvalid},
		{"inline too long", rdma.SendWR{Flags: rdma.SendInline, Inline: make([]byte, 65)}, rdma.ErrInvalid},
		{"inline without flag", rdma.SendWR{Inline: make([]byte, 1)}, rdma.ErrInvalid},
		{"inline READ", rdma.SendWR{Op: rdma.OpRead, Flags: rdma.SendInline}, rdma.ErrInvalid},
		{"message too long", rdma.SendWR{SGL: []rdma.SGE{{Length: 1 << 31}, {Length: 1}}}, rdma.ErrInvalid},
		{"fine", rdma.SendWR{}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := b.q.PostSend(b.now, []rdma.SendWR{tt.wr}); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
	n, err := b.q.PostSend(b.now, make([]rdma.SendWR, 16))
	if n != 15 || !errors.Is(err, rdma.ErrQueueFull) {
		t.Errorf("PostSend to a full queue = %d, %v", n, err)
	}
}

// Peers that serve fewer READs at once have fewer asked.
func TestRequester_readsAsked(t *testing.T) {
	b := newBench(t, func(_ *QPConfig, a *rdma.QPAttr) { a.ReadsAsked = 2 })
	for i := range 5 {
		b.send(b.wr(uint64(i), rdma.OpRead, 1))
	}
	if got := len(b.out()); got != 2 {
		t.Errorf("%d READs are outstanding, want 2", got)
	}
}

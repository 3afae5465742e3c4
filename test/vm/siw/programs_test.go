// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strconv"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// testPrograms plays the other ends of the programs that come with librdmacm.
func (b *bed) testPrograms(t *testing.T) {
	crc, noCRC := softiwarp.ConnectOptions{}, softiwarp.ConnectOptions{NoCRC: true}
	for _, c := range []struct {
		name string
		siw  settings
		us   softiwarp.ConnectOptions
		size int
	}{
		{"none wants CRC", nil, noCRC, 4000},
		{"we want CRC", nil, crc, 4000},
		{"siw wants CRC", settings{"mpa_crc_required": "1"}, noCRC, 4000},
		{"both want CRC", settings{"mpa_crc_required": "1"}, crc, maxPing},
		{"peer-to-peer", settings{"peer_to_peer": "1"}, crc, 64},
		{"peer-to-peer without CRC", settings{"peer_to_peer": "1"}, noCRC, maxPing},
		{"not peer-to-peer", nil, softiwarp.ConnectOptions{NoPeerToPeer: true}, 64},
		{"small ULPDUs", nil, softiwarp.ConnectOptions{MaxULPDU: 128}, 4000},
		{"large ULPDUs", nil, softiwarp.ConnectOptions{MaxULPDU: 60_000}, maxPing},
	} {
		t.Run("rping/"+c.name, func(t *testing.T) {
			b.set(t, c.siw)
			t.Run("server", func(t *testing.T) { b.pingServer(t, c.us, c.size) })
			t.Run("client", func(t *testing.T) { b.pingClient(t, c.us, c.size) })
		})
	}
	t.Run("ucmatose", func(t *testing.T) { b.testUcmatose(t, 4) })
	t.Run("rdma_client", b.testClient)
	t.Run("rdma_server", b.testServer)
}

const (
	// pings is how many messages rping has go there and back.
	pings = 5
	// maxPing is the longest message that rping takes.
	maxPing = 64<<10 - 1
)

// pingServer is rping's server.
func (b *bed) pingServer(t *testing.T, o softiwarp.ConnectOptions, size int) {
	l := b.listen(t)
	client := b.start(t, "rping", "-c", "-V", "-a", b.host.Addr().String(), "-p", portOf(l), "-C", strconv.Itoa(pings), "-S", strconv.Itoa(size))
	p := b.newPeer(t, 2, pingInfoBytes)
	accept(t, l, p, o)
	for range pings {
		p.pong(t, size)
	}
	p.disconnected(t)
	client.done(t)
}

// pingClient is rping's client.
func (b *bed) pingClient(t *testing.T, o softiwarp.ConnectOptions, size int) {
	_, at := b.serve(t, "rping", "-s", "-P", "-S", strconv.Itoa(size))
	p := b.newPeer(t, 2, pingInfoBytes)
	b.dial(t, p, at, o)
	for i := range pings {
		p.ping(t, size, i)
	}
	b.disconnect(t, p)
	b.stillServes(t, at)
}

// ping has the server read a text and write it elsewhere.
func (p *peer) ping(t *testing.T, size, seed int) {
	t.Helper()
	source, sink := p.MR.Bytes()[bulk:bulk+size], p.MR.Bytes()[bulk+maxPing+1:][:size]
	for i := range source {
		source[i] = byte('!' + (i+seed)%('~'-'!'))
	}
	source[size-1] = 0 // it is a string
	clear(sink)
	p.send(t, pingInfo(p.MR.Addr()+bulk, uint32(p.MR.RKey()), uint32(size)))
	p.receive(t) // it has read it
	p.send(t, pingInfo(p.MR.Addr()+bulk+maxPing+1, uint32(p.MR.RKey()), uint32(size)))
	p.receive(t) // it has written it
	if !bytes.Equal(source, sink) {
		t.Errorf("ping %d: rping has written other bytes than it has read", seed)
	}
}

// pong reads the client's text and writes it to where the client says then; the client
// compares them.
func (p *peer) pong(t *testing.T, size int) {
	t.Helper()
	at := p.buffer(t, size)
	p.post(t, rdma.SendWR{Op: rdma.OpRead, SGL: []rdma.SGE{p.SGE(bulk, size)}, RemoteAddr: at.addr, RKey: at.key})
	if text := p.MR.Bytes()[bulk : bulk+size]; !bytes.HasPrefix(text, []byte("rdma-ping-")) || text[size-1] != 0 {
		t.Errorf("we have read %q and so on, want the text of rping", text[:min(size, 20)])
	}
	p.send(t, make([]byte, pingInfoBytes))
	at = p.buffer(t, size)
	p.post(t, rdma.SendWR{Op: rdma.OpWrite, SGL: []rdma.SGE{p.SGE(bulk, size)}, RemoteAddr: at.addr, RKey: at.key})
	p.send(t, make([]byte, pingInfoBytes))
}

// remote is memory of the program's.
type remote struct {
	addr uint64
	key  rdma.RKey
}

// buffer receives where the client's memory is.
func (p *peer) buffer(t *testing.T, size int) remote {
	t.Helper()
	in := p.receive(t)
	if len(in) != pingInfoBytes || binary.BigEndian.Uint32(in[12:]) != uint32(size) {
		t.Fatalf("rping sent %x, want %d bytes that end with the size %d", in, pingInfoBytes, size)
	}
	return remote{binary.BigEndian.Uint64(in), rdma.RKey(binary.BigEndian.Uint32(in[8:]))}
}

// testUcmatose has several connections at once. The server sends first: as a client, siw
// has to say that it is ready, which it does as a peer-to-peer connection's.
func (b *bed) testUcmatose(t *testing.T, connections int) {
	const messages, size = 10, 1000
	options := []string{"-c", strconv.Itoa(connections), "-C", strconv.Itoa(messages), "-S", strconv.Itoa(size)}
	sends := func(t *testing.T, all []*peer) {
		for i := range connections * messages {
			all[i%connections].send(t, make([]byte, size))
		}
	}
	receives := func(t *testing.T, all []*peer) {
		for i := range connections * messages {
			if got := len(all[i%connections].receive(t)); got != size {
				t.Fatalf("message of %d bytes, want %d", got, size)
			}
		}
	}
	t.Run(fmt.Sprintf("server of %d", connections), func(t *testing.T) {
		b.set(t, settings{"peer_to_peer": "1"})
		l := b.listen(t)
		client := b.start(t, append([]string{"ucmatose", "-s", b.host.Addr().String(), "-p", portOf(l)}, options...)...)
		var all []*peer
		for range connections {
			p := b.newPeer(t, messages, size)
			accept(t, l, p, softiwarp.ConnectOptions{})
			all = append(all, p)
		}
		sends(t, all)
		receives(t, all)
		for _, p := range all {
			b.disconnect(t, p)
		}
		client.done(t)
	})
	client := func(t *testing.T, o softiwarp.ConnectOptions) {
		server, at := b.serve(t, append([]string{"ucmatose"}, options...)...)
		var all []*peer
		for range connections {
			p := b.newPeer(t, messages, size)
			b.dial(t, p, at, o)
			all = append(all, p)
		}
		receives(t, all)
		sends(t, all)
		for _, p := range all {
			p.disconnected(t)
		}
		server.done(t)
	}
	t.Run(fmt.Sprintf("client of %d", connections), func(t *testing.T) { client(t, softiwarp.ConnectOptions{}) })
	// siw does not wait for our first message, though it should.
	t.Run(fmt.Sprintf("client of %d, not peer-to-peer", connections), func(t *testing.T) {
		client(t, softiwarp.ConnectOptions{NoPeerToPeer: true})
	})
}

// simpleBytes is the size of the messages of rdma_client and rdma_server.
const simpleBytes = 16

// testClient is rdma_server.
func (b *bed) testClient(t *testing.T) {
	l := b.listen(t)
	client := b.start(t, "rdma_client", "-s", b.host.Addr().String(), "-p", portOf(l))
	p := b.newPeer(t, 1, simpleBytes)
	accept(t, l, p, softiwarp.ConnectOptions{})
	if got := len(p.receive(t)); got != simpleBytes {
		t.Errorf("message of %d bytes, want %d", got, simpleBytes)
	}
	p.send(t, make([]byte, simpleBytes))
	p.disconnected(t)
	client.done(t)
}

// testServer is rdma_client.
func (b *bed) testServer(t *testing.T) {
	server, at := b.serve(t, "rdma_server")
	p := b.newPeer(t, 1, simpleBytes)
	b.dial(t, p, at, softiwarp.ConnectOptions{})
	p.send(t, make([]byte, simpleBytes))
	if got := len(p.receive(t)); got != simpleBytes {
		t.Errorf("message of %d bytes, want %d", got, simpleBytes)
	}
	p.disconnected(t)
	server.done(t)
}

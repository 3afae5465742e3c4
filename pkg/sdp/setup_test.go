// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// Who connects and does not say Hello, or says another one, is refused before there is a queue pair, and others are served meanwhile.
func TestListener_refuses(t *testing.T) {
	hello := bsdh.Message{MID: bsdh.Hello, Bufs: 8, Setup: bsdh.Setup{Major: 1, Minor: 1, MaxAdverts: 1, RecvBytes: 4096, IRD: 1, ORD: 1}}
	version := hello
	version.Setup.Major = 2
	none := hello
	none.Setup.MaxAdverts = 0
	few := hello
	few.Bufs = 2
	eachOnTCP(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		refused := make(chan error, 8)
		p := newPair(t, open, func(c *sdp.Config) {
			c.SetupTimeout = 500 * time.Millisecond
			c.Hooks.Refused = func(_ net.Addr, err error) { refused <- err }
		})
		for _, tc := range []struct {
			name  string
			bytes []byte
			want  error
			text  string
		}{
			{"nothing", nil, socket.ErrSetupTimeout, ""},
			{"garbage", []byte(strings.Repeat("GET / HTTP/1.1\r\n", 6)), nil, "sdp:"},
			{"another version", version.Append(nil, bsdh.LayoutFigures), nil, ""},
			{"no adverts", none.Append(nil, bsdh.LayoutFigures), nil, ""},
			{"few buffers", few.Append(nil, bsdh.LayoutFigures), nil, ""},
		} {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(clientAddr)}}
			c, err := d.DialContext(t.Context(), "tcp", p.l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Write(tc.bytes); err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
			a, b := p.dial(t)
			_, _ = a.Close(), b.Close()
			_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
			if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: read %d bytes: %v", tc.name, n, err)
			}
			_ = c.Close()
			select {
			case err := <-refused:
				if tc.want != nil && !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.text) {
					t.Errorf("%s: refused: %v", tc.name, err)
				}
			case <-time.After(5 * time.Second):
				t.Errorf("%s: not refused", tc.name)
			}
		}
	})
}

// A peer that takes the connection and has no SDP gives an error in time, whatever it does.
func TestDial_peerWithoutSDP(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(c net.Conn)
	}{
		{"says nothing", func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }},
		{"closes", func(net.Conn) {}},
		{"answers otherwise", func(c net.Conn) {
			_, _ = c.Write([]byte(strings.Repeat("220 ready\r\n", 20)))
			_, _ = io.Copy(io.Discard, c)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
				l, err := net.Listen("tcp", net.JoinHostPort(serverAddr, "0"))
				if err != nil {
					t.Fatal(err)
				}
				served := make(chan struct{})
				go func() {
					defer close(served)
					if c, err := l.Accept(); err == nil {
						tc.do(c)
						_ = c.Close()
					}
				}()
				p := newPair(t, open, func(c *sdp.Config) { c.SetupTimeout = 300 * time.Millisecond })
				begin := time.Now()
				c, _, err := p.dialer().Dial(t.Context(), l.Addr().String())
				if err == nil {
					_ = c.Close()
					t.Error("connected")
				}
				if d := time.Since(begin); d > 3*time.Second {
					t.Errorf("took %v: %v", d, err)
				}
				_ = l.Close()
				<-served
			})
		})
	}
}

// The loss of the peer's device is a reset, once what had arrived is read.
func TestConn_peerDies(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		p := newPair(t, open)
		a, b := p.dial(t)
		if _, err := b.Write([]byte("last words")); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 4)
		if _, err := io.ReadFull(a, got); err != nil {
			t.Fatal(err)
		}
		if err := b.Abort(); err != nil {
			t.Fatal(err)
		}
		rest, err := io.ReadAll(a)
		if string(rest) != " words" || !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read %q: %v", rest, err)
		}
		if _, err := a.Write(got); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("write: %v", err)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Out-of-band bytes are told of, and left out of the stream or in it, as the program wants.
func TestConn_urgent(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		a, b := newPair(t, open).dial(t)
		if _, err := a.WriteUrgent([]byte("abc!")); err != nil {
			t.Fatal(err)
		}
		<-b.UrgentNotify()
		if _, err := a.Write([]byte("def")); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 6)
		if _, err := io.ReadFull(b, got); err != nil || string(got) != "abcdef" {
			t.Errorf("read %q: %v", got, err)
		}
		if u, err := b.ReadUrgent(); u != '!' || err != nil {
			t.Errorf("urgent %q: %v", u, err)
		}
		if _, err := b.ReadUrgent(); !errors.Is(err, syscall.EAGAIN) {
			t.Errorf("urgent again: %v", err)
		}
		b.SetUrgentInline(true)
		if _, err := a.WriteUrgent([]byte("g?")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(b, got[:2]); err != nil || string(got[:2]) != "g?" {
			t.Errorf("read %q: %v", got[:2], err)
		}
		if _, err := b.ReadUrgent(); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("urgent inline: %v", err)
		}
		_, _ = a.Close(), b.Close()
	})
}

// lacking is a device that has less than it has, or something else.
type lacking struct {
	rdma.Device
	attr rdma.DeviceAttr
}

func (d lacking) Attr() rdma.DeviceAttr { return d.attr }

// Configurations that cannot be are refused, and say why.
func TestNewStack_refuses(t *testing.T) {
	dev, roce := openIWARP(t, clientAddr), openRoCE(t, clientAddr)
	noReads, foreign, noRoCE, short := roce.Attr(), roce.Attr(), roce.Attr(), roce.Attr()
	noReads.RDMARead, foreign.Stream, noRoCE.GIDTypes, short.MaxMRBytes = false, true, nil, 1<<20
	fits := sdp.Config{Device: lacking{roce, short}, RecvBuffers: 16, RecvBufferSize: 32 << 10, MaxRecvBufferSize: 64 << 10, SendSlots: 31}
	s, err := sdp.NewStack(fits)
	if err != nil {
		t.Fatal(err)
	}
	_ = s.Close()
	manyRecvs, longRecvs, manySends := fits, fits, fits
	manyRecvs.RecvBuffers++
	longRecvs.MaxRecvBufferSize++
	manySends.SendSlots++ // beside them there are some bytes more
	for name, cfg := range map[string]sdp.Config{
		"no device":     {},
		"small buffers": {Device: dev, RecvBufferSize: 8},
		"few buffers":   {Device: dev, RecvBuffers: 1},
		"layout":        {Device: dev, Layout: 7},
		"timeout":       {Device: dev, SetupTimeout: -1},
		"no RDMA READ":  {Device: lacking{roce, noReads}},
		"its own setup": {Device: lacking{roce, foreign}},
		"no RoCE v2":    {Device: lacking{roce, noRoCE}},

		"negative buffers":      {Device: dev, RecvBufferSize: -1},
		"huge buffers":          {Device: dev, RecvBufferSize: 1 << 32},
		"buffers of 32 KiB":     {Device: dev, RecvBufferSize: 1<<32 + 32<<10},
		"huge ones of the peer": {Device: dev, MaxRecvBufferSize: 1 << 32},
		"32 KiB of the peer":    {Device: dev, MaxRecvBufferSize: 1<<32 + 32<<10},
		"many slots":            {Device: dev, SendSlots: 1025},
		"a region of receives":  manyRecvs,
		"a region of long ones": longRecvs,
		"a region of messages":  manySends,
	} {
		if s, err := sdp.NewStack(cfg); err == nil {
			t.Errorf("%s: no error", name)
			_ = s.Close()
		} else if !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

func TestConfig_validate(t *testing.T) {
	device := newFakeFabric().device("d", 1)
	for _, tc := range []struct {
		name string
		edit func(*smcr.Config)
		ok   bool
	}{
		{"zero values", func(*smcr.Config) {}, true},
		{"no device", func(c *smcr.Config) { c.Devices = nil }, false},
		{"a device that is nil", func(c *smcr.Config) { c.Devices = []rdma.Device{nil} }, false},
		{"nine devices", func(c *smcr.Config) { c.Devices = make([]rdma.Device, 9) }, false},
		{"smallest RMBE", func(c *smcr.Config) { c.RMBESizeBytes = 16 << 10 }, true},
		{"an RMBE that is too small", func(c *smcr.Config) { c.RMBESizeBytes = 8 << 10 }, false},
		{"a send buffer that is no power of two", func(c *smcr.Config) { c.SendBufferBytes = 48 << 10 }, false},
		{"256 RMBEs in an RMB", func(c *smcr.Config) { c.RMBEsPerRMB = 256 }, false},
		{"negative memory", func(c *smcr.Config) { c.MemoryBytes = -1 }, false},
		{"no answers looked for", func(c *smcr.Config) { c.AnswerPoll = -1 }, true},
		{"15 connections in a group", func(c *smcr.Config) { c.ConnsPerGroup = 15 }, false},
		{"nine links", func(c *smcr.Config) { c.LinksPerGroup = 9 }, false},
		{"an empty enterprise ID", func(c *smcr.Config) { c.EIDs = make([]clc.EID, 1) }, false},
		{"an unknown version", func(c *smcr.Config) { c.Versions = smcr.VersionsV2 + 1 }, false},
		{"an unknown dialect", func(c *smcr.Config) { c.Dialects = smcr.DialectsLinux + 1 }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := smcr.Config{Devices: []rdma.Device{device}}
			tc.edit(&c)
			if err := c.Validate(); (err == nil) != tc.ok {
				t.Errorf("error %v, want one: %v", err, !tc.ok)
			}
		})
	}
}

// Stack.RemoveDevice and Config.RailOf know a device by its name. So two devices of one name are refused,
// whether they are one device that was given twice or two different ones.
func TestConfig_deviceNames(t *testing.T) {
	f := newFakeFabric()
	a, b := f.device("a", 1), f.device("b", 2)
	for _, tc := range []struct {
		name    string
		devices []rdma.Device
		want    string // part of the error; "" for valid
	}{
		{"two names", []rdma.Device{a, b}, ""},
		{"two devices of one name", []rdma.Device{a, b, f.device("b", 3)}, `Devices[1] and Devices[2] have the same name "b"`},
		{"one device twice", []rdma.Device{a, b, a}, `Devices[0] and Devices[2] have the same name "a"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := smcr.Config{Devices: tc.devices}.Validate()
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
}

// calls counts the calls of the hooks.
type calls struct {
	mu                sync.Mutex // guards what is below
	Malformed, Failed int
}

func (n *calls) hooks(c *smcr.Config) {
	count := func(of *int) func(string, error) {
		return func(string, error) {
			n.mu.Lock()
			defer n.mu.Unlock()
			*of++
		}
	}
	c.Hooks.Malformed, c.Hooks.Failed = count(&n.Malformed), count(&n.Failed)
}

func (n *calls) now() (malformed, failed int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.Malformed, n.Failed
}

// Hooks.Malformed is told of messages of peers that are not understood, and Hooks.Failed of all other
// errors: that this stack's own budget is full is no sign of an attack.
func TestHooks_malformed(t *testing.T) {
	peer := func(talk func(t *testing.T, c net.Conn)) func(*testing.T, *pair) {
		return func(t *testing.T, p *pair) {
			c := p.dialTCP(t)
			talk(t, c)
			_ = c.Close()
		}
	}
	confirms := func(edit func(*clc.Endpoint)) func(t *testing.T, c net.Conn) {
		return func(t *testing.T, c net.Conn) {
			m := testProposal("127.0.0.0/24")
			propose(t, c, &m)
			e := testEndpoint(true)
			edit(&e)
			confirm(c, e)
		}
	}
	for _, tc := range []struct {
		name              string
		do                func(*testing.T, *pair)
		malformed, failed bool
	}{
		{"nothing is wrong", func(t *testing.T, p *pair) {
			a, b := p.dial(t)
			exchange(t, a, b)
			_, _ = a.Close(), b.Close()
		}, false, false},
		{"its own budget is full", func(t *testing.T, p *pair) {
			for range 4 {
				a, b := p.dial(t)
				t.Cleanup(func() { _, _ = a.Close(), b.Close() })
			}
		}, false, true},
		{"a client that says nothing", peer(func(t *testing.T, c net.Conn) { wantReset(t, c) }), false, true},
		{"no CLC message", peer(func(_ *testing.T, c net.Conn) { _, _ = fmt.Fprint(c, "GET / HTTP/1.1\r\n\r\n") }), true, true}, // and its end
		{"a Confirm of somebody else", peer(confirms(func(e *clc.Endpoint) { e.PeerID[0]++ })), true, false},
		{"an RMBE that cannot be", peer(confirms(func(e *clc.Endpoint) { e.RMBEIndex = 0 })), true, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var n calls
			f := newFakeFabric()
			p := &pair{fabric: f, client: newStack(t, f.device("c", 1)), server: newStack(t, f.device("s", 2), quick, n.hooks, func(c *smcr.Config) {
				c.MaxConns = 2
			})}
			p.listen(t)
			tc.do(t, p)
			waitFor(t, "what the hooks are told", func() bool {
				malformed, failed := n.now()
				return (malformed > 0) == tc.malformed && (failed > 0 || !tc.failed)
			})
			malformed, failed := n.now()
			if d := cmp.Diff([2]bool{tc.malformed, tc.failed}, [2]bool{malformed > 0, failed > 0}); d != "" {
				t.Errorf("malformed, failed (-want +got):\n%s", d)
			}
		})
	}
}

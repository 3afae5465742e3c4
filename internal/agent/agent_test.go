// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func TestReload_policyEndsConnections(t *testing.T) {
	b := newBench(t, "", preferAll)
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	c := b.dial(p, 0)
	value(c.Write([]byte("x")))(t)
	value(io.ReadFull(c, make([]byte, 1)))(t)
	if conns := value(b.client.Conns(t.Context()))(t).Conns; len(conns) != 1 || conns[0].Mode != "SMC-R" || conns[0].LinkGroup != 7 {
		t.Errorf("connections %+v", conns)
	}

	b.configure("", "polices: []\n") // a mistake changes nothing
	b.reload <- struct{}{}
	eventually(t, func() string {
		if !strings.Contains(b.log.String(), "unknown field") {
			return "the mistake was not reported"
		}
		return ""
	})
	b.configure("  rmbe: 64KiB\n", preferAll) // takes a restart
	b.reload <- struct{}{}
	eventually(t, func() string {
		if !strings.Contains(b.log.String(), "node.rmbe") {
			return "the change that takes a restart was not reported"
		}
		return ""
	})
	value(c.Write([]byte("x")))(t)
	value(io.ReadFull(c, make([]byte, 1)))(t)

	b.configure("", "policies:\n- {name: p, ports: [9]}\n")
	b.reload <- struct{}{}
	wantReset(t, c)
	eventually(t, func() string {
		e := value(b.client.Explain(t.Context(), "test/a", p.dst.String()))(t)
		if len(e.Recent) == 0 || e.Recent[0].Reason != agentapi.CodePolicyChange || e.Code != agentapi.CodeNoPolicy {
			return fmt.Sprintf("explanation %+v", e)
		}
		return ""
	})
	p.redir.look(func() {
		if p.redir.updates == 0 || p.redir.cfg.Outbound[0].Ports[0].First != 9 {
			t.Errorf("redirection not updated: %+v", p.redir.cfg)
		}
	})

	b.configure("", "") // no policy at all: nothing is diverted any more
	b.reload <- struct{}{}
	eventually(t, func() string {
		if s := b.attachment("a").State; s != agentapi.StateIdle {
			return s
		}
		return ""
	})
}

func TestRun_cannotStart(t *testing.T) {
	tests := []struct {
		name  string
		spoil func(b *bench)
		want  string
	}{
		{"preflight", func(b *bench) {
			b.cfg.preflight = func() error {
				return &linux.FeatureError{Feature: "nftables", Remedy: "load the module", Err: syscall.EPERM}
			}
		}, "this node cannot run the agent: nftables: operation not permitted: load the module"},
		{"device", func(b *bench) {
			b.cfg.openDevice = func(string, config.Device, bool) (rdma.Device, func() error, error) {
				return nil, nil, syscall.EADDRINUSE
			}
		}, "open RDMA device node.devices[0], 192.0.2.1: address already in use"},
		{"second device", func(b *bench) {
			b.cfg.Node.Devices = append(b.cfg.Node.Devices, config.Device{SoftAddress: netip.MustParseAddr("192.0.2.2")})
			open := b.cfg.openDevice
			opened := 0
			b.cfg.openDevice = func(name string, d config.Device, share bool) (rdma.Device, func() error, error) {
				if d.SoftAddress == b.cfg.Node.Devices[1].SoftAddress {
					return nil, nil, syscall.EADDRNOTAVAIL
				}
				opened++
				dev, _, err := open(name, d, share)
				return dev, func() error { opened--; return nil }, err
			}
			b.t.Cleanup(func() {
				if opened != 0 {
					b.t.Errorf("%d devices are still open", opened)
				}
			})
		}, "open RDMA device node.devices[1], 192.0.2.2: cannot assign requested address"},
		{"unsupported device", func(b *bench) {
			b.cfg.openDevice = nil // the real ones
			b.cfg.Node.Devices = []config.Device{{RDMA: "nowhere0"}}
		}, `open RDMA device "nowhere0"`},
		{"data directory", func(b *bench) {
			must(t, os.WriteFile(filepath.Join(b.dir, "attachments"), nil, 0o600))
		}, "data directory"},
		{"another agent", func(b *bench) {
			l := value(net.Listen("unix", b.cfg.Node.APISocket))(b.t)
			b.t.Cleanup(func() { _ = l.Close() })
		}, "another agent answers"},
		{"socket is a file", func(b *bench) {
			must(b.t, os.WriteFile(b.cfg.Node.APISocket, nil, 0o600))
		}, "is not a socket"},
		{"socket is a directory", func(b *bench) {
			must(b.t, os.Mkdir(b.cfg.Node.APISocket, 0o700))
		}, "is not a socket"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, "", preferAll)
			tt.spoil(b)
			if err := Run(t.Context(), b.cfg); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Run = %v, want %q in it", err, tt.want)
			}
		})
	}
}

func TestRun_replacesDeadAgentsSocket(t *testing.T) {
	b := newBench(t, "", preferAll)
	l := value(net.Listen("unix", b.cfg.Node.APISocket))(t).(*net.UnixListener)
	l.SetUnlinkOnClose(false)
	must(t, l.Close())
	b.start()
	st := value(os.Stat(b.cfg.Node.APISocket))(t)
	if st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", st.Mode())
	}
}

func TestRun_drains(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.cfg.Node.DrainTimeout = time.Hour
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	ends, stays := b.dial(p, 0), b.dial(p, 0)
	for _, c := range []*net.TCPConn{ends, stays} {
		value(c.Write([]byte("x")))(t)
		value(io.ReadFull(c, make([]byte, 1)))(t)
	}
	b.cancel()
	eventually(t, func() string {
		removed := false
		p.redir.look(func() { removed = p.redir.removed })
		if s := b.status(); !s.Draining || !removed {
			return "the agent does not drain"
		}
		return ""
	})
	exchange(t, ends, 1000) // carried connections live on
	if err := b.client.Sync(t.Context()); err == nil || !strings.Contains(err.Error(), "stopping") {
		t.Errorf("sync of a stopping agent: %v", err)
	}
	close(b.hurry)
	wantReset(t, stays)
	b.stop()
}

// TestRun_drainsPolicyChange: what a policy no longer allows ends at once, also of an agent that drains.
func TestRun_drainsPolicyChange(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.cfg.Node.DrainTimeout = time.Hour
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	c := b.dial(p, 0)
	pingOnce(t, c)
	b.cancel()
	eventually(t, func() string {
		if !b.status().Draining {
			return "the agent does not drain"
		}
		return ""
	})
	b.configure("", "policies:\n- {name: p, ports: [9]}\n")
	b.reload <- struct{}{}
	wantReset(t, c)
	b.stop()
}

// The rules divert until they are removed, which takes long on a busy machine. What they divert
// then is served, also if the accept loop had nothing to do since the agent was told to end.
func TestRun_drainsSlowly(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.cfg.Node.DrainTimeout = time.Hour
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	removing, removed := make(chan struct{}), make(chan struct{})
	p.redir.look(func() {
		p.redir.removing = sync.OnceFunc(func() {
			close(removing)
			<-removed
		})
	})
	b.cancel()
	<-removing
	<-time.After(b.cfg.Node.RedirectTTL) // the loop comes round several times
	c := b.dial(p, 0)
	close(removed)
	exchange(t, c, 1000)
	b.stop()
}

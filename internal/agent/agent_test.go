// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

func TestFlow_outbound(t *testing.T) {
	tests := []struct {
		name            string
		extra, policies string
		mode            smcr.Mode
		reason          clc.Reason
		err             error
		deaf            bool // nobody listens at the destination
		wantReset       bool
		wantMode        string
		wantCode        agentapi.Code
		wantBypass      bool
	}{
		{name: "smcr", policies: preferAll, mode: smcr.ModeSMCR, wantMode: "SMC-R"},
		{name: "peer without", policies: preferAll, reason: clc.ReasonPeerNoSMC, wantMode: "TCP", wantCode: "PEERNOSMC", wantBypass: true},
		{name: "passing reason", policies: preferAll, reason: clc.ReasonMem, wantMode: "TCP", wantCode: agentapi.CodeBudgetMemory, wantBypass: true},
		{name: "no cache", extra: "  negativeCacheTTL: 0s\n", policies: preferAll, reason: clc.ReasonPeerNoSMC, wantMode: "TCP", wantCode: "PEERNOSMC"},
		{name: "required", policies: "policies:\n- {name: p, mode: Required}\n", reason: clc.ReasonPeerNoSMC, wantReset: true, wantMode: "reset", wantCode: agentapi.CodeRequired},
		{name: "no connections left", extra: "  budgets: {pod: {connections: 0}}\n", policies: preferAll, mode: smcr.ModeSMCR, wantMode: "TCP", wantCode: agentapi.CodeBudgetConns, wantBypass: true},
		{name: "no connections left and required", extra: "  budgets: {pod: {connections: 0}}\n", policies: "policies:\n- {name: p, mode: Required}\n", mode: smcr.ModeSMCR, wantReset: true, wantMode: "reset", wantCode: agentapi.CodeRequired},
		{name: "not selected", policies: "policies:\n- {name: p, ports: [9]}\n", mode: smcr.ModeSMCR, wantMode: "TCP", wantCode: agentapi.CodeNoPolicy},
		{name: "refused", policies: preferAll, mode: smcr.ModeSMCR, deaf: true, wantReset: true, wantMode: "reset", wantCode: agentapi.CodeConnect},
		{name: "rendezvous breaks", policies: preferAll, err: errors.New("no CLC"), wantReset: true, wantMode: "reset", wantCode: agentapi.CodeRendezvous, wantBypass: true},
		{name: "peer resets in the rendezvous", policies: preferAll, err: syscall.ECONNRESET, wantReset: true, wantMode: "reset", wantCode: agentapi.CodeRendezvous},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, tt.extra, tt.policies)
			b.stack.set(tt.mode, tt.reason, tt.err)
			p := b.attach("a", 1)
			p.dst = b.server()
			if tt.deaf {
				p.dst = netip.MustParseAddrPort("127.0.0.1:1")
			}
			b.start()
			if tt.wantReset {
				b.dialReset(p, 0)
			} else {
				exchange(t, b.dial(p, 0), 300_000)
			}
			var e agentapi.Explanation
			eventually(t, func() string {
				e = value(b.client.Explain(t.Context(), "test/a", p.dst.String()))(t)
				if len(e.Recent) != 1 || b.status().Conns.Live != 0 {
					return fmt.Sprintf("explanation %+v", e)
				}
				return ""
			})
			if d := e.Recent[0]; d.Mode != tt.wantMode || d.Reason != tt.wantCode {
				t.Errorf("decision %+v, want %s %s", d, tt.wantMode, tt.wantCode)
			}
			if e.Verdict == "" || e.Code == agentapi.CodeUnseen {
				t.Errorf("verdict %q, code %s", e.Verdict, e.Code)
			}
			p.redir.look(func() {
				if got := len(p.redir.bypassed) == 1; got != tt.wantBypass {
					t.Errorf("bypassed %v", p.redir.bypassed)
				}
			})
			s := b.status()
			if s.NodeBudget.ConnsUsed != 0 || s.NodeBudget.MemoryUsedBytes != 0 {
				t.Errorf("budget not given back: %+v", s.NodeBudget)
			}
		})
	}
}

func TestFlow_inbound(t *testing.T) {
	tests := []struct {
		name            string
		extra, policies string
		deaf            bool
		wantDecline     clc.Reason
		wantCode        agentapi.Code
	}{
		{name: "smcr", policies: preferAll},
		{name: "policy", policies: "policies:\n- {name: p, ports: [9]}\n", wantDecline: clc.ReasonConfigErr, wantCode: agentapi.CodeNoPolicy},
		{name: "budget", extra: "  budgets: {node: {connections: 1}, pod: {connections: 0}}\n", policies: preferAll, wantDecline: clc.ReasonMem, wantCode: agentapi.CodeBudgetConns},
		{name: "application refuses", policies: preferAll, deaf: true, wantCode: agentapi.CodeApplication},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, tt.extra, tt.policies)
			p := b.attach("a", 1)
			p.app = b.server()
			if tt.deaf {
				p.app = netip.MustParseAddrPort("127.0.0.1:1")
			}
			b.start()
			dst := b.door(p, 1)
			if tt.deaf {
				b.dialReset(p, 1)
			} else {
				exchange(t, b.dial(p, 1), 100_000)
			}
			eventually(t, func() string {
				e := value(b.client.Explain(t.Context(), "127.0.0.1", dst.String()))(t)
				if len(e.Recent) != 1 || e.Recent[0].Reason != tt.wantCode || e.Recent[0].Direction != "inbound" {
					return fmt.Sprintf("explanation %+v", e)
				}
				return ""
			})
			b.stack.mu.Lock()
			defer b.stack.mu.Unlock()
			if tt.deaf != (len(b.stack.declined) == 0) || !tt.deaf && b.stack.declined[0] != tt.wantDecline {
				t.Errorf("declined %v, want %v", b.stack.declined, tt.wantDecline)
			}
		})
	}
}

// TestFlow_notRedirected: who connects to the agent's own port gets nothing.
func TestFlow_notRedirected(t *testing.T) {
	b := newBench(t, "", preferAll)
	p := b.attach("a", 1)
	b.start()
	b.dialReset(p, 0)
}

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

func TestManager_podComesAndGoes(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.start()
	p := b.attach("a", 1)
	b.sync()
	if a := b.attachment("a"); a.State != agentapi.StateReady || a.Policies[0] != "all" {
		t.Errorf("attachment %+v", a)
	}
	must(t, b.store.Delete("a", "eth0"))
	b.sync()
	if s := b.status(); s.Pods.Attached != 0 {
		t.Errorf("pods %+v", s.Pods)
	}
	p.redir.look(func() {
		if !p.redir.removed || !b.stack.closed {
			t.Errorf("redirection removed: %t, stack closed: %t", p.redir.removed, b.stack.closed)
		}
	})
	p.k.change(func() {
		if p.sweeps != 1 {
			t.Errorf("swept %d times", p.sweeps)
		}
	})
}

func TestManager_namespaceDisappears(t *testing.T) {
	b := newBench(t, "", preferAll)
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	c := b.dial(p, 0)
	value(c.Write([]byte("x")))(t)
	value(io.ReadFull(c, make([]byte, 1)))(t)
	p.k.change(func() { p.isGone = true })
	b.sync()
	wantReset(t, c)
	if a := b.attachment("a"); a.State != agentapi.StateFailed || !strings.Contains(a.Detail, "is gone") {
		t.Errorf("attachment %+v", a)
	}
	e := value(b.client.Explain(t.Context(), "test/a", p.dst.String()))(t)
	if e.Code != agentapi.CodePodFailed {
		t.Errorf("explanation %+v", e)
	}
	p.redir.look(func() {
		if !p.redir.closed || p.redir.removed {
			t.Error("the redirection of a namespace that is gone was not just closed")
		}
	})
	// Another namespace under the same path, and a record that means it.
	b.attach("a", 2)
	b.sync()
	if a := b.attachment("a"); a.State != agentapi.StateReady {
		t.Errorf("attachment %+v", a)
	}
}

func TestManager_failuresAreRetried(t *testing.T) {
	for _, step := range []string{"open", "other namespace", "listen", "install"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel() // each waits for a retry
			b := newBench(t, "", preferAll)
			var p *fakePod
			switch step {
			case "open":
				b.record("a", 1)
			case "other namespace":
				p = b.kernel.add("/netns/a", 9)
				b.record("a", 1)
			default:
				p = b.attach("a", 1)
				p.failStep = step
			}
			b.start()
			if a := b.attachment("a"); a.State != agentapi.StateFailed || a.Detail == "" {
				t.Errorf("attachment %+v", a)
			}
			if n := b.kernel.handles(); n != 0 {
				t.Errorf("%d handles left", n)
			}
			if s := b.status(); s.Accelerating || s.Pods.Failed != 1 || len(s.Problems) != 1 {
				t.Errorf("status %+v", s)
			}
			// The next poll finds it repaired.
			b.kernel.change(func() {
				if p == nil || step == "other namespace" {
					b.kernel.pods["/netns/a"] = &fakePod{k: b.kernel, inode: 1}
				} else {
					p.failStep = ""
				}
			})
			eventually(t, func() string {
				if s := b.attachment("a").State; s != agentapi.StateReady {
					return s
				}
				return ""
			})
		})
	}
}

// TestManager_twoInterfaces: attachments of one namespace share what the agent
// puts there, and policies see each by its own name.
func TestManager_twoInterfaces(t *testing.T) {
	b := newBench(t, "", "policies:\n- {name: p, pods: {interfaces: [net1]}, ports: [80]}\n")
	p := b.attach("a", 1)
	b.start()
	if a := b.attachment("a"); a.State != agentapi.StateIdle {
		t.Errorf("attachment %+v", a)
	}
	must(t, b.store.Write(cni.Attachment{
		ContainerID: "a2", IfName: "net1", NetNS: "/netns/a", NetNSID: 1, Network: "n",
		Pod: cni.Pod{Namespace: "test", Name: "a"}, IPs: []netip.Prefix{netip.MustParsePrefix("192.0.2.4/24")},
	}))
	b.sync()
	if one, two := b.attachment("a"), b.attachment("a2"); one.State != agentapi.StateReady || two.State != agentapi.StateReady {
		t.Errorf("attachments %+v %+v", one, two)
	}
	if n := b.kernel.handles(); n != 1 {
		t.Errorf("%d handles", n)
	}
	p.redir.look(func() {
		if len(p.redir.cfg.Outbound) != 2 || p.redir.cfg.Outbound[0].Ports[0].First != 80 { // IPv4 and IPv6
			t.Errorf("redirection %+v", p.redir.cfg)
		}
	})
	for src, want := range map[string]agentapi.Code{"127.0.0.1": agentapi.CodeNoPolicy, "192.0.2.4": agentapi.CodeUnseen} {
		if e := value(b.client.Explain(t.Context(), src, "192.0.2.9:80"))(t); e.Code != want {
			t.Errorf("%s: %+v, want %s", src, e, want)
		}
	}
}

// TestManager_directoryDisappears: what an unmounted disk does must not reset
// anybody's connections.
func TestManager_directoryDisappears(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.attach("a", 1)
	b.start()
	away := b.store.Dir() + ".away"
	must(t, os.Rename(b.store.Dir(), away))
	b.sync()
	if a := b.attachment("a"); a.State != agentapi.StateReady {
		t.Errorf("attachment %+v", a)
	}
	must(t, os.Rename(away, b.store.Dir()))
	b.sync()
	if a := b.attachment("a"); a.State != agentapi.StateReady {
		t.Errorf("attachment %+v", a)
	}
}

func TestManager_malformedRecords(t *testing.T) {
	b := newBench(t, "", preferAll)
	must(t, b.store.MakeDir())
	must(t, os.WriteFile(filepath.Join(b.store.Dir(), "junk-eth0.json"), []byte("{"), 0o600))
	b.attach("a", 1)
	b.start()
	got := value(b.client.Attachments(t.Context()))(t)
	if len(got.Malformed) != 1 || !strings.Contains(got.Malformed[0], "junk-eth0.json") {
		t.Errorf("malformed %q", got.Malformed)
	}
	if a := b.attachment("a"); a.State != agentapi.StateReady {
		t.Errorf("a good record suffers: %+v", a)
	}
}

func TestRun_withoutOption(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.cfg.openOption = func() (smcr.Option, func() error, error) { return nil, nil, errors.New("no BPF here") }
	p := b.attach("a", 1)
	b.start()
	s := b.status()
	if s.Accelerating || len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "no BPF here") {
		t.Errorf("status %+v", s)
	}
	if a := b.attachment("a"); a.State != agentapi.StateIdle || p.redir != nil {
		t.Errorf("something is diverted: %+v", a)
	}
	e := value(b.client.Explain(t.Context(), "test/a", "192.0.2.9:80"))(t)
	if e.Code != agentapi.CodeNoOption {
		t.Errorf("explanation %+v", e)
	}
}

// TestRun_withoutOptionRequired: a policy that requires SMC-R holds all the
// same.
func TestRun_withoutOptionRequired(t *testing.T) {
	b := newBench(t, "", "policies:\n- {name: p, mode: Required}\n")
	b.cfg.openOption = func() (smcr.Option, func() error, error) { return nil, nil, errors.New("no BPF here") }
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	b.dialReset(p, 0)
}

func TestRun_cannotStart(t *testing.T) {
	other := value(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer other.Close()
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
		{"metrics port in use", func(b *bench) {
			b.cfg.Node.MetricsAddress = addrPort(other.Addr())
		}, "address already in use: choose another node.metricsAddress"},
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

func TestHeartbeat(t *testing.T) {
	b := newBench(t, "", preferAll)
	p := b.attach("a", 1)
	b.start()
	renews := func() (n int) {
		p.redir.look(func() { n = p.redir.renews })
		return n
	}
	wantMore := func() {
		t.Helper()
		before := renews()
		eventually(t, func() string {
			if renews() < before+2 {
				return "no renewals"
			}
			return ""
		})
	}
	wantMore()
	// Somebody deletes the table.
	p.redir.look(func() { p.redir.renewErr = linux.ErrNoTable })
	eventually(t, func() string {
		updates := 0
		p.redir.look(func() { updates = p.redir.updates })
		if updates == 0 {
			return "the table was not put back"
		}
		return ""
	})
	wantMore()
	// The stack hangs: no renewals until it answers again.
	hang := make(chan struct{})
	b.stack.mu.Lock()
	b.stack.hang = hang
	b.stack.mu.Unlock()
	eventually(t, func() string {
		before := renews()
		<-time.After(b.cfg.Node.RedirectTTL)
		if renews() != before {
			return "renewed although the stack hangs"
		}
		return ""
	})
	close(hang)
	wantMore()
}

func TestAPI(t *testing.T) {
	b := newBench(t, "", preferAll)
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	exchange(t, b.dial(p, 0), 10)
	eventually(t, func() string {
		if b.status().Conns.Live != 0 {
			return "the connection does not end"
		}
		return ""
	})

	tests := []struct {
		path string
		code int
		want string
	}{
		{"/v1/status", 200, `"apiVersion":"smcr.io/agent/v1"`},
		{"/v1/links", 200, `"error":"EOF"`},
		{"/v1/conns", 200, `"conns":[]`},
		{"/v1/attachments", 200, `"state":"ready"`},
		{"/v1/explain?src=test/a&dst=" + p.dst.String(), 200, `"code":""`},
		{"/v1/explain?src=127.0.0.1&dst=" + p.dst.String(), 200, `"code":""`},
		{"/v1/explain?src=test/a&dst=192.0.2.1:1", 200, `"code":"UNSEEN"`},
		{"/v1/explain?src=198.51.100.1&dst=192.0.2.1:1", 200, `"code":"NOT_ATTACHED"`},
		{"/v1/explain?src=a&dst=192.0.2.1:1", 400, "want an address"},
		{"/v1/explain?src=test/a&dst=192.0.2.1", 400, "want ADDRESS:PORT"},
		{"/v1/attachments/sync", 405, ""},
		{"/v2/status", 404, ""},
		{"/metrics", 200, `kube_smcr_connections_total{direction="outbound",mode="SMC-R"} 1`},
		{"/metrics", 200, `kube_smcr_pods{state="ready"} 1`},
		{"/metrics", 200, `kube_smcr_relayed_bytes_total{mode="TCP"} 0`},
		{"/metrics", 200, `kube_smcr_link_groups{redundancy="Symmetric"} 0`},
		{"/metrics", 200, `kube_smcr_budget_memory_bytes 4.294967296e+09`},
	}
	for _, tt := range tests {
		t.Run(tt.path, func(t *testing.T) {
			if code, body := b.get(tt.path); code != tt.code || !strings.Contains(body, tt.want) {
				t.Errorf("%d %s, want %d with %q", code, body, tt.code, tt.want)
			}
		})
	}
}

func TestAPI_refusesOthers(t *testing.T) {
	b := newBench(t, "", preferAll)
	var allow func(uint32) bool
	b.cfg.mayUseAPI = func(uid uint32) bool { return allow == nil || allow(uid) }
	b.start()
	b.client.Close()
	allow = func(uid uint32) bool { return uid != uint32(os.Getuid()) }
	_, err := b.client.Status(t.Context())
	if err == nil || !strings.Contains(err.Error(), "may not use this socket") {
		t.Errorf("Status = %v", err)
	}
	allow = nil
	if mayUseAPI(uint32(os.Getuid())+1) && os.Getuid() != 0 || !mayUseAPI(0) {
		t.Error("mayUseAPI is wrong")
	}
}

func TestDecisions_bounded(t *testing.T) {
	s := newDecisions()
	d := agentapi.Decision{Pod: "p", Source: netip.MustParseAddr("192.0.2.1")}
	for i := range maxDecisions + 10 {
		d.Dest = netip.AddrPortFrom(netip.MustParseAddr("192.0.2.2"), uint16(i))
		if !s.record(d) {
			t.Fatalf("decision %d is no news", i)
		}
	}
	if s.order.Len() != maxDecisions || len(s.byKey) != maxDecisions {
		t.Errorf("%d decisions, %d keys", s.order.Len(), len(s.byKey))
	}
	if s.record(d) {
		t.Error("the same decision again is news")
	}
	if got := s.find([]netip.Addr{d.Source}, d.Dest); len(got) != 1 || got[0].Count != 2 {
		t.Errorf("found %+v", got)
	}
	d.Reason = "MEM"
	if !s.record(d) {
		t.Error("another reason is no news")
	}
}

func TestBypasses_bounded(t *testing.T) {
	b := bypasses{all: map[bypassKey]agentapi.Bypass{}}
	now := time.Unix(1000, 0)
	x := agentapi.Bypass{Pod: "p", Until: now.Add(time.Second)}
	for i := range maxBypasses + 10 {
		x.Dest = netip.AddrPortFrom(netip.MustParseAddr("192.0.2.2"), uint16(i))
		b.add(x, now)
	}
	if len(b.all) != maxBypasses {
		t.Errorf("%d entries", len(b.all))
	}
	if b.get("p", netip.MustParseAddrPort("192.0.2.2:5"), now) == nil {
		t.Error("entry is missing")
	}
	if b.get("p", netip.MustParseAddrPort("192.0.2.2:5"), x.Until) != nil || len(b.list(x.Until)) != 0 {
		t.Error("entries do not end")
	}
}

func TestGate(t *testing.T) {
	var g gate
	now := time.Unix(1000, 0)
	passed := 0
	for range logBurst + 20 {
		if ok, _ := g.pass(now); ok {
			passed++
		}
	}
	ok, dropped := g.pass(now.Add(time.Second))
	if passed != logBurst || !ok || dropped != 20 {
		t.Errorf("%d passed; a second later %t after %d left out", passed, ok, dropped)
	}
}

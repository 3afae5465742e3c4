// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/records"
)

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
		Pod: records.Pod{Namespace: "test", Name: "a"}, IPs: []netip.Prefix{netip.MustParsePrefix("192.0.2.4/24")},
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

// TestManager_slowPod: a pod whose namespace cannot be opened for a while holds
// up neither others nor what is asked about them, and is not said to be in line.
func TestManager_slowPod(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.start()
	hang := make(chan struct{})
	b.kernel.change(func() { b.kernel.hang = map[string]chan struct{}{"/netns/slow": hang} })
	b.attach("slow", 1)
	b.attach("other", 2)
	must(t, cni.Notify(t.Context(), b.cfg.Node.APISocket, cni.Event{Verb: "ADD", ContainerID: "other"}))
	if x := b.attachment("other"); x.State != agentapi.StateReady {
		t.Errorf("attachment %+v", x)
	}
	if s := b.status(); s.Pods.Attached != 1 {
		t.Errorf("pods %+v", s.Pods)
	}
	close(hang)
	b.sync()
	if x := b.attachment("slow"); x.State != agentapi.StateReady {
		t.Errorf("attachment %+v", x)
	}
}

// TestManager_status: STATUS is answered while a pod's set-up takes long.
func TestManager_status(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.start()
	hang := make(chan struct{})
	b.kernel.change(func() { b.kernel.hang = map[string]chan struct{}{"/netns/slow": hang} })
	b.attach("slow", 1)
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	for range 2 {
		must(t, cni.Notify(ctx, b.cfg.Node.APISocket, cni.Event{Verb: "STATUS"}))
	}
	close(hang)
	b.sync()
}

// attachAgain makes a pod with a record at the path of one that is gone without its DEL. The earlier record is the first by name.
func (b *bench) attachAgain() *fakePod {
	b.t.Helper()
	p := b.kernel.add("/netns/a", 2)
	for id, name := range map[uint64]string{1: "former", 2: "now"} {
		att := attachmentOf(name, fmt.Sprintf("192.0.2.%d/24", id))
		att.NetNS, att.NetNSID, att.Network, att.Created = "/netns/a", id, "n", time.Unix(int64(id), 0).UTC()
		must(b.t, b.store.Write(att))
	}
	return p
}

// TestManager_pathAgain: a record of a pod that is gone does not take the place of the pod that has its path now.
func TestManager_pathAgain(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.attachAgain()
	b.start()
	all := value(b.client.Attachments(t.Context()))(t)
	if len(all.Attachments) != 1 || len(all.Malformed) != 1 || !strings.Contains(all.Malformed[0], "former-eth0") {
		t.Fatalf("%+v", all)
	}
	if a := all.Attachments[0]; a.ContainerID != "now" || a.State != agentapi.StateReady {
		t.Errorf("attachment %+v", a)
	}
	must(t, b.store.Delete("former", "eth0"))
	b.sync()
	if all := value(b.client.Attachments(t.Context()))(t); len(all.Malformed) != 0 {
		t.Errorf("%+v", all)
	}
}

// TestManager_manyAtOnce: pods that share devices are set up and ended at once.
func TestManager_manyAtOnce(t *testing.T) {
	b := newBench(t, "", preferAll)
	for i := range 40 {
		b.attach(fmt.Sprintf("p%d", i), uint64(i+1))
	}
	b.start()
	if s := b.status(); s.Pods.Ready != 40 {
		t.Errorf("pods %+v", s.Pods)
	}
	for i := range 40 {
		must(t, b.store.Delete(fmt.Sprintf("p%d", i), "eth0"))
	}
	b.sync()
	if s := b.status(); s.Pods.Attached != 0 || s.NodeBudget.ConnsUsed != 0 {
		t.Errorf("%+v", s)
	}
}

// TestManager_gone: an idle pod that is gone without its CNI DEL is found out, and from then on its address is that of no
// pod of the node: a pod on another node may have it. If another record has the address, that one counts.
func TestManager_gone(t *testing.T) {
	b := newAbleBare(t, "", "")
	b.a.holds.enable(b.a)
	b.a.holds.on = true
	b.kernel.add("/netns/left", 1)
	atts := []cni.Attachment{attachmentOf("left", "192.0.2.7/24")}
	addr, now := atts[0].IPs[0].Addr(), time.Now()
	p := &pod{set: b.a.rnics.Node()}
	round := func(after time.Duration, force bool, want string, attached bool) {
		t.Helper()
		now = now.Add(after)
		next := b.a.manager.step(t.Context(), *p, atts, now, force)
		p = &next
		b.a.manager.put(atts[0].NetNS, p)
		if p.state.String() != want || b.a.attached(nil, addr) != attached {
			t.Errorf("state %q, has its address: %v; want %q, %v", p.state, b.a.attached(nil, addr), want, attached)
		}
	}
	round(0, false, agentapi.StateIdle, true)
	round(time.Second, false, agentapi.StateIdle, true)
	b.kernel.change(func() { delete(b.kernel.pods, "/netns/left") })
	round(time.Second, true, agentapi.StateIdle, true) // not looked at again yet
	round(retryMost, false, agentapi.StateIdle, false)
	round(0, true, agentapi.StateIdle, false)
	round(retryMost, false, agentapi.StateIdle, false)
	p.swept = false // as after a restart: nothing is to be swept there
	round(0, true, agentapi.StateIdle, false)

	b.put("", preferAll)
	px := b.proxy("client").px
	b.manage(px, nil)
	ask := func() agentapi.Code {
		return value(View{b.a}.Explain("127.0.0.1", addr.String()+":80"))(t).Code
	}
	if code := ask(); code != agentapi.CodeUnseen {
		t.Errorf("a connection to the address is %s, want %s", code, agentapi.CodeUnseen)
	}
	b.manage(px, func(p *pod) { p.atts = []cni.Attachment{attachmentOf("other", addr.String()+"/24")} })
	if code := ask(); code != agentapi.CodeSameNode {
		t.Errorf("a connection to another pod with the address is %s, want %s", code, agentapi.CodeSameNode)
	}

	// It was out of sight only, with what an earlier agent left there.
	b.put("", "")
	seen := b.kernel.add("/netns/left", 1)
	round(retryMost, false, agentapi.StateIdle, true)
	round(retryMost, false, agentapi.StateIdle, true)
	if seen.sweeps != 1 {
		t.Errorf("swept %d times, want once", seen.sweeps)
	}
}

// TestProxy_stackless: a proxy that was started without a device is told from one with a stack.
func TestProxy_stackless(t *testing.T) {
	for want, s := range map[bool]stack{true: noStack{}, false: &fakeStack{}} {
		if got := (&proxy{stack: s}).stackless(); got != want {
			t.Errorf("%T: stackless %t", s, got)
		}
	}
}

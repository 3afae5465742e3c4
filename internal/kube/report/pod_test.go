// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

func TestStatusOf(t *testing.T) {
	ready, idle, failed := attachment("shop/web", agentapi.StateReady), attachment("shop/web", agentapi.StateIdle), attachment("shop/web", agentapi.StateFailed)
	paused := ready
	paused.Paused = agentapi.CodeBudgetRelays
	kernel := ready
	kernel.Datapath = "Kernel"
	tests := []struct {
		name   string
		atts   []agentapi.Attachment
		change func(*Snapshot, *config.Verdict)
		want   string
	}{
		{"ready", []agentapi.Attachment{ready}, nil, "Enabled"},
		{"not attached", nil, nil, "Pending: NOT_ATTACHED"},
		{"failed", []agentapi.Attachment{ready, failed}, nil, "Pending: POD_FAILED"},
		{"opted out", []agentapi.Attachment{ready}, func(_ *Snapshot, v *config.Verdict) { v.OptedIn = false }, ""},
		{"uninstalled", []agentapi.Attachment{ready}, func(s *Snapshot, _ *config.Verdict) { s.Uninstalled = true }, ""},
		{"left", []agentapi.Attachment{ready}, func(s *Snapshot, _ *config.Verdict) { s.Uninstalled, s.Left = true, "x" }, "Fallback: NO_AGENT"},
		{"left, opted out", nil, func(s *Snapshot, v *config.Verdict) { s.Uninstalled, s.Left, v.OptedIn = true, "x", false }, ""},
		{"no option", []agentapi.Attachment{idle}, func(s *Snapshot, _ *config.Verdict) {
			s.Status.Unable, s.Status.UnableCode = "x", agentapi.CodeNoOption
		}, "Fallback: NO_OPTION"},
		{"draining", nil, func(s *Snapshot, _ *config.Verdict) { s.Status.Draining = true }, "Fallback: DRAINING"},
		{"no device", []agentapi.Attachment{ready}, func(s *Snapshot, _ *config.Verdict) { s.Status.Devices = nil }, "Fallback: NOSMCDEV"},
		{"ports down", []agentapi.Attachment{ready}, func(s *Snapshot, _ *config.Verdict) { s.Status.Devices[0].Port = "DOWN" }, "Fallback: NOSMCDEV"},
		{"transport", []agentapi.Attachment{ready}, func(_ *Snapshot, v *config.Verdict) { v.Settings.Mismatch = config.MismatchTransport }, "Fallback: TRANSPORT"},
		{"version", []agentapi.Attachment{ready}, func(_ *Snapshot, v *config.Verdict) { v.Settings.Mismatch = config.MismatchVersion }, "Fallback: VERSMISMAT"},
		{"mesh", []agentapi.Attachment{func() agentapi.Attachment {
			a := ready
			a.Reason = agentapi.CodeMesh
			return a
		}()}, nil, "Fallback: MESH"},
		{"kernel", []agentapi.Attachment{kernel}, nil, "Enabled: KERNEL"},
		{"kernel, and no device of the agent's", []agentapi.Attachment{kernel}, func(s *Snapshot, v *config.Verdict) {
			s.Status.Devices, v.Settings.Mismatch = nil, config.MismatchTransport
		}, "Enabled: KERNEL"},
		{"kernel, and an agent that can do nothing", []agentapi.Attachment{kernel}, func(s *Snapshot, _ *config.Verdict) { s.Status.Unable = "x" }, "Enabled: KERNEL"},
		{"kernel at one interface only", []agentapi.Attachment{kernel, ready}, func(s *Snapshot, _ *config.Verdict) { s.Status.Devices = nil }, "Fallback: NOSMCDEV"},
		{"kernel, whose filter could not be changed", []agentapi.Attachment{func() agentapi.Attachment {
			a := kernel
			a.State = agentapi.StateFailed
			return a
		}()}, nil, "Enabled: KERNEL"},
		{"kernel that could not be had", []agentapi.Attachment{failed, kernel}, nil, "Pending: POD_FAILED"},
		{"idle", []agentapi.Attachment{idle}, nil, "Fallback: NO_POLICY"},
		{"with sockets of the kernel's from before", []agentapi.Attachment{func() agentapi.Attachment {
			a := idle
			a.Datapath, a.Reason = "Kernel", agentapi.CodeOldSockets
			return a
		}()}, nil, "Fallback: OLD_SOCKETS"},
		{"paused", []agentapi.Attachment{ready, paused}, nil, "Fallback: BUDGET_RELAYS"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s, v := healthy(), verdict("web")
			if tt.change != nil {
				tt.change(&s, &v)
			}
			var atts []*agentapi.Attachment
			for i := range tt.atts {
				atts = append(atts, &tt.atts[i])
			}
			got := statusOf(&s, &v, atts, &traffic{}, began())
			if got.String() != tt.want {
				t.Errorf("status %q, want %q", got, tt.want)
			}
			if back := parsePodStatus(got.String()); back != got {
				t.Errorf("read again: %+v, want %+v", back, got)
			}
			if got.code != "" && strings.HasPrefix(got.code.Text(), "unknown") && got.code != "TRANSPORT" {
				t.Errorf("%s has no text", got.code)
			}
		})
	}
}

// TestStatusOf_ownDevice: what the node's devices are does not matter to a pod with devices of its own, and what these lack
// the agent says.
func TestStatusOf_ownDevice(t *testing.T) {
	own := func(state string, reason agentapi.Code) agentapi.Attachment {
		a := attachment("shop/web", state)
		a.Devices, a.Reason = []string{"0000:01:10.2"}, reason
		return a
	}
	ready := own(agentapi.StateReady, "")
	ports := func(ports ...string) func(*Snapshot, *config.Verdict) {
		return func(s *Snapshot, _ *config.Verdict) {
			s.PodDevices = []agentapi.PodDevice{{ID: "0000:01:10.2"}, {ID: "eth7", Used: &agentapi.Device{Port: portActive}}}
			for _, port := range ports {
				s.PodDevices = append(s.PodDevices, agentapi.PodDevice{ID: "0000:01:10.2", Used: &agentapi.Device{Port: port}})
			}
		}
	}
	for _, tt := range []struct {
		name   string
		atts   []agentapi.Attachment
		change func(*Snapshot, *config.Verdict)
		want   string
	}{
		{"ready", []agentapi.Attachment{ready}, nil, "Enabled"},
		{"a node of another kind", []agentapi.Attachment{ready}, func(_ *Snapshot, v *config.Verdict) {
			v.Settings.Mismatch = config.MismatchTransport
		}, "Enabled"},
		{"a node without devices", []agentapi.Attachment{ready}, func(s *Snapshot, _ *config.Verdict) { s.Status.Devices = nil }, "Enabled"},
		{"a node with its port down", []agentapi.Attachment{ready}, func(s *Snapshot, _ *config.Verdict) { s.Status.Devices[0].Port = "DOWN" }, "Enabled"},
		{"its port is up", []agentapi.Attachment{ready}, ports("ACTIVE"), "Enabled"},
		{"its port is down", []agentapi.Attachment{ready}, ports("DOWN"), "Fallback: POD_DEVICE"},
		{"one of two ports is down", []agentapi.Attachment{ready}, ports("DOWN", "ACTIVE"), "Enabled"},
		{"the agent does not use it", []agentapi.Attachment{ready}, ports(), "Enabled"},
		{"missing from the start", []agentapi.Attachment{own(agentapi.StateIdle, agentapi.CodePodDevice)}, nil, "Fallback: POD_DEVICE"},
		{"missing from the start, as all of the node's", []agentapi.Attachment{own(agentapi.StateIdle, agentapi.CodePodDevice)}, func(s *Snapshot, _ *config.Verdict) {
			s.Status.Devices, s.Status.Unable, s.Status.UnableCode = nil, "no device", agentapi.CodeOf(clc.ReasonNoDev)
		}, "Fallback: POD_DEVICE"},
		{"gone", []agentapi.Attachment{own(agentapi.StateReady, agentapi.CodePodDevice)}, nil, "Fallback: POD_DEVICE"},
		{"of a kind that policies do not allow", []agentapi.Attachment{own(agentapi.StateReady, agentapi.CodeTransport)}, nil, "Fallback: TRANSPORT"},
		{"an agent that can do nothing", []agentapi.Attachment{own(agentapi.StateIdle, agentapi.CodeNoOption)}, nil, "Fallback: NO_OPTION"},
		{"missing in a sandbox before this one", []agentapi.Attachment{own(agentapi.StateIdle, agentapi.CodePodDevice), ready}, nil, "Enabled"},
		{"not selected", []agentapi.Attachment{attachment("shop/web", agentapi.StateIdle)}, nil, "Fallback: NO_POLICY"},
		{"could not be set up", []agentapi.Attachment{own(agentapi.StateFailed, "")}, nil, "Pending: POD_FAILED"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, v := healthy(), verdict("web")
			if tt.change != nil {
				tt.change(&s, &v)
			}
			var atts []*agentapi.Attachment
			for i := range tt.atts {
				atts = append(atts, &tt.atts[i])
			}
			if got := statusOf(&s, &v, atts, &traffic{}, began()).String(); got != tt.want {
				t.Errorf("status %q, want %q", got, tt.want)
			}
		})
	}
}

// TestParsePodStatus_noAgent: an agent that is back finds what the controller wrote of a pod whose kernel carried on,
// which is no news, and writes it anew.
func TestParsePodStatus_noAgent(t *testing.T) {
	if got := parsePodStatus(v1alpha1.PodStatusKernelNoAgent); got != parsePodStatus(v1alpha1.PodStatusKernel) || !got.kernel {
		t.Errorf("%+v", got)
	}
	s, p := healthy(), newTestPlanner()
	s.Verdicts = []config.Verdict{verdict("web")}
	kernel := attachment("shop/web", agentapi.StateReady)
	kernel.Datapath = config.DatapathKernel.String()
	s.Attachments = []agentapi.Attachment{kernel}
	s.Annotations = map[string]string{s.Verdicts[0].UID: v1alpha1.PodStatusKernelNoAgent}
	p.plan(&s, began())
	e := p.queue.entries[key{kind: kindPod, namespace: "shop", name: "web"}]
	if e == nil || e.differs != inState || e.want.state != v1alpha1.PodStatusKernel {
		t.Errorf("to write: %+v", e)
	}
	if len(p.news.waiting) != 0 {
		t.Errorf("events %+v", p.news.waiting)
	}
}

func TestTraffic(t *testing.T) {
	no := agentapi.CodeOf(clc.ReasonPeerNoSMC)
	type step struct {
		at   time.Duration
		mode string // empty: a link group is there
		code agentapi.Code
	}
	tests := []struct {
		name  string
		steps []step
		at    time.Duration
		want  agentapi.Code
	}{
		{"nothing", nil, time.Hour, ""},
		{"one fallback, just now", []step{{0, "TCP", no}}, fallbackAfter - 1, ""},
		{"one fallback, some time ago", []step{{0, "TCP", no}}, fallbackAfter, no},
		{"one fallback, long ago", []step{{0, "TCP", no}}, fallbackMemory + 1, ""},
		{"the last reason counts", []step{{0, "TCP", no}, {time.Second, "TCP", agentapi.CodeBudgetConns}}, time.Minute, agentapi.CodeBudgetConns},
		{"SMC-R before", []step{{0, smcrMode, ""}, {1, "TCP", no}}, time.Minute, no},
		{"SMC-R after", []step{{0, "TCP", no}, {1, smcrMode, ""}}, time.Minute, ""},
		{"a link group", []step{{0, "TCP", no}, {1, "", ""}}, time.Minute, ""},
		{"the destination does not answer", []step{{0, "TCP", agentapi.CodeConnect}}, time.Minute, ""},
		{"refused", []step{{0, "reset", agentapi.CodeRequired}}, time.Minute, agentapi.CodeRequired},
		{"the policies changed", []step{{0, "TCP", no}, {1, "forget", ""}}, time.Minute, ""},
		{"just after the policies changed", []step{{0, "TCP", no}, {1, "forget", ""}, {time.Second, "TCP", no}}, time.Minute, ""},
		{"after the policies changed", []step{{0, "TCP", no}, {1, "forget", ""}, {policyDelay + 2, "TCP", no}}, time.Minute, no},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var tr traffic
			for _, s := range tt.steps {
				d := decided("shop/web", s.mode, s.code, began().Add(s.at))
				switch {
				case s.mode == "":
					tr.alive(false, false)
				case s.mode == "forget":
					tr.forget(d.Last)
				case d.Last.After(tr.latest): // as noteTraffic does it
					tr.note(&d)
				}
			}
			if got := tr.reason(began().Add(tt.at)); got != tt.want {
				t.Errorf("reason %q, want %q", got, tt.want)
			}
		})
	}
}

// TestStatusOf_refused: what is reset is not plain TCP, whatever the reason is.
func TestStatusOf_refused(t *testing.T) {
	var tr traffic
	d := decided("shop/web", agentapi.ModeReset, agentapi.CodeRequired, began())
	tr.note(&d)
	ready, v := attachment("shop/web", agentapi.StateReady), verdict("web")
	for _, tt := range []struct {
		name   string
		after  time.Duration
		change func(*Snapshot)
		want   string
	}{
		{"just now", fallbackAfter / 2, func(*Snapshot) {}, "Enabled"},
		{"some time ago", fallbackAfter, func(*Snapshot) {}, "Refused: REQUIRED"},
		{"without a device", fallbackAfter, func(s *Snapshot) { s.Status.Devices = nil }, "Refused: NOSMCDEV"},
		{"long ago", fallbackMemory + 1, func(*Snapshot) {}, "Enabled"},
		{"older ones live", fallbackAfter, func(*Snapshot) { tr.alive(true, false) }, "Refused: REQUIRED, older connections live"},
	} {
		s := healthy()
		tt.change(&s)
		got := statusOf(&s, &v, []*agentapi.Attachment{&ready}, &tr, began().Add(tt.after))
		if got.String() != tt.want || parsePodStatus(got.String()) != got {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// TestStatusOf_brokenRendezvous: a connection whose rendezvous broke is reset under any policy. That says that others are refused only
// of a pod with one that requires SMC-R; of another pod a link group says that they are not.
func TestStatusOf_brokenRendezvous(t *testing.T) {
	for _, tt := range []struct {
		name            string
		required, group bool
		want            string
	}{
		{"preferred", false, false, "Fallback: RENDEZVOUS"},
		{"required", true, false, "Refused: RENDEZVOUS"},
		{"with a link group", false, true, "Enabled"},
		{"required, with a link group", true, true, "Refused: RENDEZVOUS, older connections live"},
	} {
		var tr traffic
		d := decided("shop/web", agentapi.ModeReset, agentapi.CodeRendezvous, began())
		tr.note(&d)
		if tt.group {
			tr.alive(true, tt.required)
		}
		ready, v, s := attachment("shop/web", agentapi.StateReady), verdict("web"), healthy()
		v.Required = tt.required
		if got := statusOf(&s, &v, []*agentapi.Attachment{&ready}, &tr, began().Add(fallbackAfter)); got.String() != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// TestReporter_refusedWithLiveConnections: a pod says what new connections get, and that older
// ones live, of which its link groups know.
func TestReporter_refusedWithLiveConnections(t *testing.T) {
	for _, of := range []string{"shop/web", "shop/*"} {
		synctest.Test(t, func(t *testing.T) {
			srv, src := newFakeServer(), &source{snap: healthy()}
			conns := func(n int) func(*Snapshot) {
				return func(s *Snapshot) {
					a := attachment("shop/web", agentapi.StateReady)
					a.Budget.ConnsUsed, s.Links[0].Conns = n, n
					s.Attachments = []agentapi.Attachment{a}
				}
			}
			src.change(func(s *Snapshot) {
				s.Verdicts = []config.Verdict{verdict("web")}
				s.Links = []agentapi.LinkGroup{group(of, 1, 1)}
				conns(1)(s)
			})
			start(t, srv, src)
			decide := func(mode string, code agentapi.Code) {
				src.change(func(s *Snapshot) { s.Decisions = []agentapi.Decision{decided("shop/web", mode, code, time.Now())} })
			}
			says := func(when, want string) {
				t.Helper()
				pass(fallbackAfter + 2*collectEvery)
				if got := srv.pod("web"); got != want {
					t.Errorf("link group of %s, %s: %q, want %q", of, when, got, want)
				}
			}
			says("at first", "Enabled")
			decide(agentapi.ModeReset, agentapi.CodeRequired)
			says("new ones are refused", "Refused: REQUIRED, older connections live")
			src.change(conns(0))
			says("the older ones have ended", "Refused: REQUIRED")
			decide(smcrMode, "")
			says("a new one is on SMC-R", "Enabled")
			decide("TCP", agentapi.CodeOf(clc.ReasonPeerNoSMC))
			says("a new one is plain TCP", "Enabled") // others may be on the link group at any time
		})
	}
}

// TestReporter_policyDeleted: what a policy refused is not what the pod is when there is no
// such policy any more.
func TestReporter_policyDeleted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		src.change(func(s *Snapshot) {
			v := verdict("web")
			v.Rules = "uid-of-cache/1\n"
			s.Verdicts, s.Attachments = []config.Verdict{v}, []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
		})
		start(t, srv, src)
		oneSecond()
		src.change(func(s *Snapshot) {
			s.Decisions = []agentapi.Decision{decided("shop/web", agentapi.ModeReset, agentapi.CodeRequired, time.Now())}
		})
		pass(fallbackAfter + 2*collectEvery)
		if got := srv.pod("web"); got != "Refused: REQUIRED" {
			t.Fatalf("with the policy: %q", got)
		}
		src.change(func(s *Snapshot) { s.Verdicts[0].Rules = "" })
		pass(2 * collectEvery)
		if got := srv.pod("web"); got != "Enabled" {
			t.Errorf("without the policy: %q", got)
		}
		pass(fallbackMemory)
		if got := srv.pod("web"); got != "Enabled" {
			t.Errorf("some time after: %q", got)
		}
	})
}

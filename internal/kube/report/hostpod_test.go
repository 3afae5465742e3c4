// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// hostVerdict is that of an opted-in pod in the node's network.
func hostVerdict(name string) config.Verdict {
	v := verdict(name)
	v.HostNetwork = true
	return v
}

// ofKernel is an attachment on the kernel's datapath.
func ofKernel(pod, state string) agentapi.Attachment {
	a := attachment(pod, state)
	a.Datapath = config.DatapathKernel.String()
	return a
}

// A pod in the node's network is on its kernel's datapath, or plain TCP whatever devices the agent has.
func TestStatusOf_hostNetwork(t *testing.T) {
	old := ofKernel("shop/web", agentapi.StateIdle)
	old.Reason = agentapi.CodeOldSockets
	unavailable := attachment("shop/web", agentapi.StateIdle)
	unavailable.NotKernel = "no module smc"
	for _, tt := range []struct {
		name   string
		atts   []agentapi.Attachment
		change func(*Snapshot, *config.Verdict)
		want   string
	}{
		{"no cgroup yet", nil, nil, "Pending: NOT_ATTACHED"},
		{"kernel", []agentapi.Attachment{ofKernel("shop/web", agentapi.StateReady)}, nil, "Enabled: KERNEL"},
		{"kernel, whose filter could not be changed", []agentapi.Attachment{ofKernel("shop/web", agentapi.StateFailed)}, nil, "Enabled: KERNEL"},
		{"kernel that could not be had", []agentapi.Attachment{attachment("shop/web", agentapi.StateFailed)}, nil, "Pending: POD_FAILED"},
		{"kernel that is not available", []agentapi.Attachment{unavailable}, nil, "Pending: POD_FAILED"},
		{"with sockets of the kernel's from before", []agentapi.Attachment{old}, nil, "Fallback: OLD_SOCKETS"},
		{"an agent that can do nothing itself", []agentapi.Attachment{unavailable}, func(s *Snapshot, v *config.Verdict) {
			s.Status.Unable, s.Status.UnableCode, s.Status.Devices, v.Settings.Mismatch = "x", agentapi.CodeNoOption, nil, config.MismatchTransport
		}, "Pending: POD_FAILED"},
		{"opted out", []agentapi.Attachment{old}, func(_ *Snapshot, v *config.Verdict) { v.OptedIn = false }, ""},
		{"uninstalled", []agentapi.Attachment{old}, func(s *Snapshot, _ *config.Verdict) { s.Uninstalled = true }, ""},
		{"left", nil, func(s *Snapshot, _ *config.Verdict) { s.Uninstalled, s.Left = true, "x" }, "Fallback: NO_AGENT"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, v := healthy(), hostVerdict("web")
			if tt.change != nil {
				tt.change(&s, &v)
			}
			var atts []*agentapi.Attachment
			for i := range tt.atts {
				atts = append(atts, &tt.atts[i])
			}
			if got := statusOf(&s, &v, atts, &traffic{}, began()); got.String() != tt.want {
				t.Errorf("status %q, want %q", got, tt.want)
			}
		})
	}
}

// TestReporter_hostNetwork: the status of a pod in the node's network is written once, and stays while nothing changes, while the
// agent drains, and over the restart of one.
func TestReporter_hostNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		src.snap.Verdicts = []config.Verdict{hostVerdict("web")}
		start(t, srv, src)
		says := func(after time.Duration, when, want string, writes int) {
			t.Helper()
			pass(after)
			var of []string
			for _, w := range srv.taken() {
				if strings.HasSuffix(w, "pod shop/web") {
					of = append(of, w)
				}
			}
			if got := srv.pod("web"); got != want || len(of) != writes {
				t.Errorf("%s: %q, writes %q; want %q by %d", when, got, of, want, writes)
			}
		}
		says(attachGrace-time.Second, "its cgroup is being made", "", 0)
		says(3*time.Second, "it has none", "Pending: NOT_ATTACHED", 1)
		src.change(func(s *Snapshot) { s.Attachments = []agentapi.Attachment{ofKernel("shop/web", agentapi.StateReady)} })
		says(2*time.Second, "chosen", v1alpha1.PodStatusKernel, 1)
		src.change(func(s *Snapshot) {
			s.Decisions = []agentapi.Decision{decided("shop/web", "TCP", "PEERNOSMC", time.Now())}
		})
		says(time.Minute, "connections fall back", v1alpha1.PodStatusKernel, 0)
		src.change(func(s *Snapshot) { s.Status.Draining, s.Attachments = true, nil })
		says(time.Minute, "the agent drains", v1alpha1.PodStatusKernel, 0)
		src.change(func(s *Snapshot) {
			s.Status.Draining, s.Attachments = false, []agentapi.Attachment{ofKernel("shop/web", agentapi.StateReady)}
		})
		says(time.Minute, "it serves again", v1alpha1.PodStatusKernel, 0)
		src.change(func(s *Snapshot) { s.Verdicts[0].OptedIn, s.Attachments = false, nil })
		says(2*time.Second, "opted out", "", 1)
	})
}

// Events of pods in the node's network say what is missing there: neither does the agent carry one, nor does the plugin attach it. An annotation
// without effect is told once policies had the time to come.
func TestPlanner_hostNetworkEvents(t *testing.T) {
	p, s := newTestPlanner(), healthy()
	lost, failed, without, mute := hostVerdict("lost"), hostVerdict("failed"), hostVerdict("without"), hostVerdict("mute")
	without.OptedIn, without.Ineffective, without.Because = false, true, "no SMCRPolicy selects the pod"
	mute.OptedIn, mute.Because = false, "annotate the pod itself"
	a := attachment("shop/failed", agentapi.StateIdle)
	a.NotKernel = "no module smc"
	s.Verdicts, s.Attachments = []config.Verdict{lost, failed, without, mute}, []agentapi.Attachment{a}
	events := func(at time.Duration) map[string]string {
		p.news.waiting = nil
		p.plan(&s, began().Add(at))
		out := map[string]string{}
		for _, e := range p.news.waiting {
			out[e.about.Name+" "+e.reason] = e.note
		}
		return out
	}
	if got := events(0); len(got) != 1 || !strings.Contains(got["failed SMCRFallback"], "as its kernel does not carry them (POD_FAILED): no module smc") {
		t.Errorf("at first: %q", got)
	}
	got := events(attachWarn)
	want := map[string]string{
		"lost SMCRFallback":       noCgroup,
		"without SMCRHostNetwork": "the annotation of this pod has no effect: no SMCRPolicy selects the pod",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("later (-want +got):\n%s", diff)
	}
	if got := events(attachWarn + time.Second); len(got) != 0 {
		t.Errorf("again: %q", got)
	}
}

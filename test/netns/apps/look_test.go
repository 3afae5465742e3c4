// SPDX-License-Identifier: Apache-2.0

package apps

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

// TestLookBefore: a part that ends in time is not looked at; of one that does not, what it waits for is
// seen before it is killed.
func TestLookBefore(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Program("nsenter"))
	l, err := lab.New(lab.Config{PluginDirs: []string{cniDir}, Routed: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	b := &bed{lab: l}
	for i, p := range []**lab.Pod{&b.client, &b.server} {
		if *p, err = l.Nodes[i].AddPod(t.Context(), lab.PodConfig{Name: [...]string{"client", "server"}[i], WithoutSMCR: true}); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		left time.Duration
		want string
	}{{time.Hour, ""}, {lookTime, "sockets of the pod on node 2 (<nil>)"}} {
		ctx, cancel := context.WithTimeout(t.Context(), tt.left)
		seen := b.lookBefore(ctx)
		if tt.want != "" {
			<-time.After(time.Second / 10)
		}
		if text := seen(); !strings.Contains(text, tt.want) || text == "" != (tt.want == "") {
			t.Errorf("%v before its end: %q", tt.left, text)
		}
		cancel()
	}
}

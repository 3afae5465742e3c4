// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// TestRun_stays: where the node lacks something the agent says what, diverts
// nothing, refuses what must not be plain TCP, and ends once it is there.
func TestRun_stays(t *testing.T) {
	tests := []struct {
		name  string
		spoil func(b *bench, gone *atomic.Bool)
		code  agentapi.Code
		want  string
	}{
		{"no device", func(b *bench, gone *atomic.Bool) {
			open := b.cfg.openDevice
			b.cfg.Node.Devices = []config.Device{{Interface: "eth9"}}
			b.cfg.openDevice = func(name string, d config.Device, share bool) (rdma.Device, func() error, error) {
				if gone.Load() {
					return openDevice(b.cfg.Node.DataDir, name, d, share)
				}
				return open(name, d, share)
			}
		}, "NOSMCDEV", "interface eth9 is not there"},
		{"old kernel", func(b *bench, gone *atomic.Bool) {
			b.cfg.preflight = func() error {
				if gone.Load() {
					return &linux.FeatureError{Feature: "nftables", Remedy: "load the module", Err: errors.New("not there")}
				}
				return nil
			}
		}, agentapi.CodeNoOption, "nftables: not there: load the module"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, "", "policies:\n- {name: p, pods: {names: [a]}}\n- {name: r, mode: Required, pods: {names: [required]}}\n")
			var gone atomic.Bool
			gone.Store(true)
			tt.spoil(b, &gone)
			b.cfg.Stay, b.cfg.ableEvery = true, 20*time.Millisecond
			p := b.attach("a", 1)
			required := b.attach("required", 2)
			required.dst = b.server()
			b.start()
			s := b.status()
			if s.Accelerating || s.UnableCode != tt.code || !strings.Contains(s.Unable, tt.want) {
				t.Errorf("status %+v", s)
			}
			if a := b.attachment("a"); a.State != agentapi.StateIdle || p.redir != nil || !strings.Contains(a.Detail, tt.want) {
				t.Errorf("attachment %+v", a)
			}
			b.dialReset(required, 0)

			gone.Store(false)
			select {
			case err := <-b.done:
				b.done <- err
				if err != nil {
					t.Errorf("Run = %v", err)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("the agent does not notice that what it lacked is there")
			}
		})
	}
}

// TestRun_staysWithOneDevice: a device that is missing does not keep the other
// from being used.
func TestRun_staysWithOneDevice(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.cfg.Stay = true
	b.cfg.Node.Devices = append(b.cfg.Node.Devices, config.Device{SoftAddress: netip.MustParseAddr("192.0.2.2")})
	open := b.cfg.openDevice
	b.cfg.openDevice = func(name string, d config.Device, share bool) (rdma.Device, func() error, error) {
		if name == "soft1" {
			return nil, nil, errors.New("not there")
		}
		return open(name, d, share)
	}
	b.attach("a", 1)
	b.start()
	s := b.status()
	if !s.Accelerating || len(s.Devices) != 2 || s.Devices[1].Port != rdma.PortDown.String() || !strings.Contains(strings.Join(s.Problems, " "), "node.devices[1], 192.0.2.2: not there") {
		t.Errorf("status %+v", s)
	}
}

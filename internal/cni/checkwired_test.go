// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/smcr-io/kube-smcr/internal/devices/vf"
)

// CNI specification, section 2, CHECK: a plugin later in the chain may have changed the interface. What nobody of the
// chain did is still found.
func TestCheck_changedBehind(t *testing.T) {
	needWiring(t)
	path := []string{buildReference(t, "ipam/static", "meta/sbr", "meta/tuning")}
	for _, tt := range []struct{ name, behind string }{
		{"routes in another table", `{"type":"sbr"}`},
		{"MAC", `{"type":"tuning","dataDir":"$DATA/tuning","mac":"02:00:00:00:0a:07"}`},
		{"MTU", `{"type":"tuning","dataDir":"$DATA/tuning","mtu":1400}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n, run := newWiringNode(t, path, `{"cniVersion":"1.1.0","name":"rocenet","plugins":[
				{"type":"smcr-cni","dataDir":"$DATA","deviceID":"0000:41:10.1",`+staticIPAM+`},`+tt.behind+`]}`)
			pod := newNS(t)
			rt := runtimeConf("c1", pod)
			n.add(t, rt)
			n.do(t, func(ctx context.Context) error { return n.cni.CheckNetworkList(ctx, n.list, rt) })
			must(t, pod.Do(func() error {
				routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{}, netlink.RT_FILTER_TABLE)
				for _, r := range routes {
					if r.Gw.String() == "10.97.1.9" {
						err = errors.Join(err, netlink.RouteDel(&r))
					}
				}
				return err
			}))
			err := n.ns.Do(func() error { return n.cni.CheckNetworkList(t.Context(), n.list, rt) })
			var ce *types.Error
			if !errors.As(err, &ce) || ce.Code != CodeWiring || !strings.Contains(err.Error(), "route 10.96.0.0/16 via 10.97.1.9") {
				t.Errorf("CHECK without a route: %v, want code %d", err, CodeWiring)
			}
			n.do(t, func(ctx context.Context) error { return n.cni.DelNetworkList(ctx, n.list, rt) })
			run.host.home(t)
		})
	}
}

func TestBehindUs(t *testing.T) {
	mac, mtu := "02:00:00:00:00:01", 9000
	for _, tt := range []struct {
		name     string
		it       types100.Interface
		settings vf.Settings
		want     vf.Wiring
	}{
		{"nothing asked for", types100.Interface{Name: "eth0", Sandbox: "/x", Mac: mac}, vf.Settings{}, vf.Wiring{MAC: mac}},
		{"all asked for", types100.Interface{Name: "eth0", Sandbox: "/x", Mac: mac}, vf.Settings{MAC: &mac, MTU: &mtu}, vf.Wiring{
			MAC: mac, MTU: mtu, Settings: vf.Settings{MAC: &mac, MTU: &mtu},
		}},
		{"another MAC", types100.Interface{Name: "eth0", Sandbox: "/x", Mac: "02:00:00:00:00:0A"}, vf.Settings{MAC: &mac}, vf.Wiring{MAC: "02:00:00:00:00:0a"}},
		{"no MAC", types100.Interface{Name: "eth0", Sandbox: "/x"}, vf.Settings{}, vf.Wiring{MAC: mac}},
		{"in the host", types100.Interface{Name: "eth0", Mac: "02:00:00:00:00:0A"}, vf.Settings{}, vf.Wiring{MAC: mac}},
		{"another interface", types100.Interface{Name: "eth1", Sandbox: "/x", Mac: "02:00:00:00:00:0A"}, vf.Settings{}, vf.Wiring{MAC: mac}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := behindUs(vf.Wiring{IfName: "eth0", MAC: mac, MTU: mtu, Settings: tt.settings}, &types100.Result{Interfaces: []*types100.Interface{&tt.it}})
			tt.want.IfName = "eth0"
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("wiring (-want +got):\n%s", diff)
			}
		})
	}
}

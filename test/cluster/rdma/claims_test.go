// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/internal/devices/dra"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
)

// offered waits until the ResourceSlices of a node have its VFs, each with its rail, and the NUMA node and PF that the
// node's kernel says.
func (s *suite) offered(n *guest.Node) {
	s.Helper()
	out, err := n.Guest.Shell(s.Context(), `for vf in /sys/class/net/*/device/virtfn*; do
		echo $(basename $(readlink $vf)) $(cat $vf/numa_node) $(ls $vf/physfn/net); done`)
	s.must(err)
	want := strings.Fields(strings.ReplaceAll(strings.TrimSpace(out), " ", "/"))
	slices.Sort(want)
	s.eventually("the VFs of "+n.Name+" in its ResourceSlices", func() error {
		var list resourceapi.ResourceSliceList
		if err := s.p.Client.List(s.Context(), &list); err != nil {
			return err
		}
		var got []string
		for _, slice := range list.Items {
			if slice.Spec.Driver != dra.DriverName || slice.Spec.NodeName == nil || *slice.Spec.NodeName != n.Name {
				continue
			}
			for _, d := range slice.Spec.Devices {
				if a := d.Attributes; a["kind"].StringValue != nil && *a["kind"].StringValue == "vf" {
					got = append(got, fmt.Sprintf("%s/%d/%s", *a["id"].StringValue, *a["numaNode"].IntValue, *a["pf"].StringValue))
					if rail := *a["rail"].IntValue; fmt.Sprintf("pf%d", rail) != *a["pf"].StringValue {
						s.Errorf("VF %s of %s is of rail %d", d.Name, *a["pf"].StringValue, rail)
					}
				}
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) || len(got) != vfsPerNode {
			return fmt.Errorf("there are %q, want %q", got, want)
		}
		return nil
	})
}

// claimed waits until the status of a pod's claim has the VFs that the pod has, with their names and addresses.
func (s *suite) claimed(p pod, vfs []nic) {
	s.Helper()
	s.eventually("the devices in the status of the claim of "+p.String(), func() error {
		var list resourceapi.ResourceClaimList
		if err := s.p.Client.List(s.Context(), &list, client.InNamespace(p.ns)); err != nil {
			return err
		}
		var has []string
		for _, c := range list.Items {
			if len(c.Status.ReservedFor) != 1 || c.Status.ReservedFor[0].Name != p.name {
				continue
			}
			for _, d := range c.Status.Devices {
				if d.NetworkData != nil {
					has = append(has, fmt.Sprintf("%s: %s %s", d.Device, d.NetworkData.InterfaceName, strings.Join(d.NetworkData.IPs, " ")))
				}
			}
		}
		for _, v := range vfs {
			want := fmt.Sprintf("%s: %s %s/24", strings.NewReplacer(":", "-", ".", "-").Replace(v.ParentDev), v.IfName, v.ip())
			if !strings.Contains(strings.Join(has, "\n")+"\n", want) {
				return fmt.Errorf("there are %q, want %q", has, want)
			}
		}
		return nil
	})
}

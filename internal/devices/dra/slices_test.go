// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"github.com/smcr-io/kube-smcr/internal/devices/inventory"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
)

// devices of a node: two rails of software, two VFs, one rxe.
func devices() []inventory.Device {
	soft := func(n int, up bool) inventory.Device {
		return inventory.Device{Kind: inventory.KindSoftware, Up: up, Device: vf.Device{
			ID: fmt.Sprintf("soft%d", n), NetDev: fmt.Sprintf("eth%d", n), VF: -1, NUMANode: -1, Rail: n, State: vf.StateUp, Driver: "kube-smcr",
		}}
	}
	function := func(n int) inventory.Device {
		pci := fmt.Sprintf("0000:41:10.%d", 2*n)
		return inventory.Device{Kind: inventory.KindVF, Up: true, Device: vf.Device{
			ID: pci, PCI: pci, PF: "eth1", PFPCI: "0000:41:00.0", VF: n, RDMA: []string{fmt.Sprintf("mlx5_%d", n)}, Driver: "mlx5_core",
			NetDev: fmt.Sprintf("eth1v%d", n), NUMANode: 1, PCIeRoot: "pci0000:40", Rail: 0, State: vf.StateDown,
		}}
	}
	return []inventory.Device{soft(0, true), soft(1, false), function(0), function(1), {
		Kind: inventory.KindRDMA, Up: true, Device: vf.Device{ID: "eth5", NetDev: "eth5", VF: -1, RDMA: []string{"rxe5"}, NUMANode: -1, Rail: -1, State: vf.StateUp},
	}}
}

// values are attributes as text.
func values(d resourceapi.Device) map[string]string {
	out := map[string]string{}
	for k, v := range d.Attributes {
		switch {
		case v.StringValue != nil:
			out[string(k)] = *v.StringValue
		case v.IntValue != nil:
			out[string(k)] = fmt.Sprint(*v.IntValue)
		case v.BoolValue != nil:
			out[string(k)] = fmt.Sprint(*v.BoolValue)
		}
	}
	return out
}

func names(ds []resourceapi.Device) []string {
	var out []string
	for _, d := range ds {
		out = append(out, d.Name)
	}
	return out
}

func TestPublish(t *testing.T) {
	list := devices()
	list[3].State = vf.StateVFIO // a virtual machine has it
	p := translate(list, false)
	if diff := cmp.Diff([]string{"soft0", "soft1", "0000-41-10-0", "eth5"}, names(p.devices)); diff != "" {
		t.Fatalf("devices (-want +got)\n%s", diff)
	}
	want := map[string]string{
		"id": "0000:41:10.0", "kind": "vf", "driver": "mlx5_core", "linkState": "up", "numaNode": "1", "pf": "eth1", "vf": "0", "rail": "0",
		"rdma": "true", "netdev": "eth1v0", "resource.kubernetes.io/pciBusID": "0000:41:10.0", "resource.kubernetes.io/pcieRoot": "pci0000:40",
	}
	if diff := cmp.Diff(want, values(p.devices[2])); diff != "" {
		t.Errorf("attributes of a VF (-want +got)\n%s", diff)
	}
	want = map[string]string{"id": "soft1", "kind": "software", "driver": "kube-smcr", "linkState": "down", "rail": "1", "rdma": "true", "netdev": "eth1"}
	if diff := cmp.Diff(want, values(p.devices[1])); diff != "" {
		t.Errorf("attributes of a software device (-want +got)\n%s", diff)
	}
	for _, d := range p.devices {
		shared := d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations
		if _, capacity := d.Capacity[capacityPods]; shared != capacity || shared != (values(d)["kind"] != "vf") {
			t.Errorf("%s: shared %v, capacity %v", d.Name, shared, capacity)
		}
	}
}

func TestPublish_slots(t *testing.T) {
	p := translate(devices(), true)
	if got, want := len(p.devices), 3*MaxSharers+2; got != want {
		t.Errorf("%d devices, want %d", got, want)
	}
	if d := p.ids["soft1-slot-99"]; d.ID != "soft1" {
		t.Errorf("the last slot stands for %+v", d)
	}
	r := p.resources("node-a").Pools["node-a"]
	sum := 0
	for _, s := range r.Slices {
		sum += len(s.Devices)
		if len(s.Devices) > sliceDevices {
			t.Errorf("a slice with %d devices", len(s.Devices))
		}
	}
	if sum != len(p.devices) {
		t.Errorf("%d devices in slices, want %d", sum, len(p.devices))
	}
	if got := translate(nil, false).resources("node-a").Pools["node-a"]; len(got.Slices) != 1 {
		t.Errorf("no devices: %d slices, want one that says so", len(got.Slices))
	}
}

func TestDeviceName(t *testing.T) {
	ids := []string{
		"0000:01:10.2", "0000:01:10.3", "soft0", "eth1", "eth1.100", "eth1_100", "ETH1", "eth1-100", "10000:e1:00.0", "-", "",
		strings.Repeat("x", 60), strings.Repeat("x", 61), "мережа", "eth1@if3", "-eth1", "eth1-",
	}
	seen := map[string]string{}
	for _, id := range ids {
		name := deviceName(id)
		if errs := validation.IsDNS1123Label(name + "-slot-99"); len(errs) > 0 {
			t.Errorf("%q is called %q: %v", id, name, errs)
		}
		if other, ok := seen[name]; ok {
			t.Errorf("%q and %q are both called %q", id, other, name)
		}
		seen[name] = id
	}
	for id, want := range map[string]string{"0000:01:10.2": "0000-01-10-2", "soft0": "soft0", "eth1": "eth1"} {
		if got := deviceName(id); got != want {
			t.Errorf("%q is called %q, want %q", id, got, want)
		}
	}
}

// TestPublish_collision: two IDs that would be called the same are told apart.
func TestPublish_collision(t *testing.T) {
	list := []inventory.Device{
		{Kind: inventory.KindRDMA, Device: vf.Device{ID: "a.b", VF: -1, State: vf.StateUp}},
		{Kind: inventory.KindRDMA, Device: vf.Device{ID: "a-b", VF: -1, State: vf.StateUp}},
	}
	p := translate(list, false)
	var ids []string
	for _, name := range slices.Sorted(maps.Keys(p.ids)) {
		ids = append(ids, p.ids[name].ID)
	}
	slices.Sort(ids)
	if diff := cmp.Diff([]string{"a-b", "a.b"}, ids); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestParseParameters(t *testing.T) {
	const head = `{"apiVersion": "roce.smcr.io/v1alpha1", "kind": "DeviceParameters"`
	tests := []struct{ name, text, want, err string }{
		{"name", head + `, "interfaceName": "net1"}`, "net1", ""},
		{"nothing", head + `}`, "", ""},
		{"unknown field", head + `, "ifName": "net1"}`, "", `unknown field "ifName"`},
		{"another version", `{"apiVersion": "roce.smcr.io/v2", "kind": "DeviceParameters"}`, "", `want apiVersion "roce.smcr.io/v1alpha1"`},
		{"another kind", `{"apiVersion": "roce.smcr.io/v1alpha1", "kind": "VF"}`, "", `kind "DeviceParameters"`},
		{"no object", `[]`, "", "parse"},
		{"nothing at all", ``, "", "parse"},
		{"long", head + `, "interfaceName": "sixteen-bytes-16"}`, "", "longer than 15 bytes"},
		{"slash", head + `, "interfaceName": "a/b"}`, "", "not allowed"},
		{"dots", head + `, "interfaceName": ".."}`, "", "no name of an interface"},
		{"taken", head + `, "interfaceName": "eth0"}`, "", "every pod has"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseParameters([]byte(tt.text))
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v, want %q", err, tt.err)
				}
			} else if err != nil || got.InterfaceName != tt.want {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}

// TestSample: the parameters of the sample are understood.
func TestSample(t *testing.T) {
	text, err := os.ReadFile("../../../config/samples/claim.yaml")
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := strings.Cut(string(text), "\n---\n")
	var template resourceapi.ResourceClaimTemplate
	if err := yaml.UnmarshalStrict([]byte(first), &template); err != nil {
		t.Fatal(err)
	}
	devices := template.Spec.Spec.Devices
	if len(devices.Config) != 1 || devices.Config[0].Opaque.Driver != DriverName || devices.Requests[0].Exactly.DeviceClassName != DriverName {
		t.Fatalf("sample %+v", devices)
	}
	if p, err := parseParameters(devices.Config[0].Opaque.Parameters.Raw); err != nil || p.InterfaceName != "rail0" {
		t.Errorf("parameters %+v, %v", p, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"maps"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/devices/vf"
)

// sriovRecording reads the recorded input and result of the real plugin sriov: see the README beside the
// files.
func sriovRecording(t *testing.T, name string) map[string]any {
	t.Helper()
	b, err := os.ReadFile("testdata/sriov/" + name)
	must(t, err)
	var out map[string]any
	must(t, json.Unmarshal(b, &out))
	return out
}

func parseMap(t *testing.T, m map[string]any) NetConf {
	t.Helper()
	b, err := json.Marshal(m)
	must(t, err)
	c, err := ParseNetConf(b)
	must(t, err)
	return c
}

// TestSriov_conf: smcr-cni understands the configuration that the real plugin took.
func TestSriov_conf(t *testing.T) {
	conf := sriovRecording(t, "conf.json")
	conf["type"] = "smcr-cni"
	c := parseMap(t, conf)
	if id, shared := c.deviceID(); id != "0000:41:10.0" || shared || !c.wires("net1") {
		t.Errorf("device %q, shared %v, wires %v", id, shared, c.wires("net1"))
	}
	mac, vlan, off, on := "02:00:00:00:00:51", 100, false, true
	want := vf.Settings{MAC: &mac, VLAN: &vlan, SpoofCheck: &off, Trust: &on}
	if diff := cmp.Diff(want, c.settings()); diff != "" {
		t.Errorf("settings (-want +got)\n%s", diff)
	}
}

// TestSriov_behind: chained after the real plugin, smcr-cni knows that this plugin wired net1, and has
// nothing to set there, even if net1 has no address.
func TestSriov_behind(t *testing.T) {
	conf := sriovRecording(t, "conf.json")
	maps.DeleteFunc(conf, func(k string, _ any) bool { // keep what Multus gives to every plugin of a list
		return k != "cniVersion" && k != "name" && k != "deviceID" && k != "runtimeConfig"
	})
	conf["type"], conf["prevResult"] = "smcr-cni", sriovRecording(t, "result.json")
	c := parseMap(t, conf)
	ips, err := c.addresses("net1")
	if err != nil || len(ips) > 0 || c.wires("net1") || !c.wires("net2") {
		t.Errorf("addresses %v, %v; wires net1 %v, net2 %v", ips, err, c.wires("net1"), c.wires("net2"))
	}
	must(t, c.nothingToSet("net1"))
}

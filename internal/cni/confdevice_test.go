// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/devices/vf"
)

func parseConf(fields string) (NetConf, error) {
	return ParseNetConf([]byte(`{"cniVersion":"1.1.0","name":"rocenet","type":"smcr-cni",` + fields + `}`))
}

// TestDeviceConf_carriesOver reads a configuration of the plugin sriov with
// every field that it has.
func TestDeviceConf_carriesOver(t *testing.T) {
	c, err := parseConf(`"deviceID":"0000:03:02.0","mac":"CA:FE:C0:FF:EE:00","vlan":1000,"vlanQoS":4,"vlanProto":"802.1AD",
		"min_tx_rate":100,"max_tx_rate":200,"spoofchk":"off","trust":"on","link_state":"enable","logLevel":"debug","logFile":"/tmp/sriov.log",
		"ipam":{"type":"host-local"},"mtu":9000,"requiredSettings":["trust","link_state"],"runtimeConfig":{"deviceID":"0000:03:02.2","other":1}`)
	must(t, err)
	one := func(v int) *int { return &v }
	off, on := false, true
	mac, proto, state := "ca:fe:c0:ff:ee:00", "802.1ad", "enable"
	want := vf.Settings{
		MAC: &mac, VLAN: one(1000), VLANQoS: one(4), VLANProto: &proto, SpoofCheck: &off, Trust: &on,
		MinTxRate: one(100), MaxTxRate: one(200), LinkState: &state, MTU: one(9000),
		Required: []vf.Setting{vf.SettingTrust, vf.SettingLinkState},
	}
	if diff := cmp.Diff(want, c.settings()); diff != "" {
		t.Error(diff)
	}
	if id, shared := c.deviceID(); id != "0000:03:02.2" || shared {
		t.Errorf("device %s, shared %v, want the runtime's", id, shared)
	}
	if c.mode() != vf.ModeAuto {
		t.Errorf("mode %q", c.mode())
	}
}

func TestDeviceConf_nothing(t *testing.T) {
	c, err := parseConf(`"ipam":null,"runtimeConfig":{}`)
	must(t, err)
	if diff := cmp.Diff(vf.Settings{}, c.settings()); diff != "" || c.firstSetting() != "" {
		t.Errorf("settings of a configuration without any: %s", diff)
	}
}

func TestDeviceConf_mistakes(t *testing.T) {
	for _, tt := range []struct{ name, conf, want string }{
		{"VLAN too high", `"vlan":4095`, "vlan; is 4095, must be between 0 (none) and 4094"},
		{"VLAN below zero", `"vlan":-1`, "vlan; is -1"},
		{"VLAN is text", `"vlan":"5"`, "vlan; "},
		{"priority too high", `"vlan":5,"vlanQoS":8`, "vlanQoS; is 8, must be between 0 and 7"},
		{"priority without VLAN", `"vlanQoS":3`, "vlanQoS; needs vlan"},
		{"priority without a tag", `"vlan":0,"vlanQoS":3`, "vlanQoS; needs a vlan other than 0"},
		{"protocol without VLAN", `"vlanProto":"802.1q"`, "vlanProto; needs vlan"},
		{"protocol without a tag", `"vlan":0,"vlanProto":"802.1ad"`, "vlanProto; 802.1ad needs a vlan other than 0"},
		{"unknown protocol", `"vlan":5,"vlanProto":"802.1x"`, `vlanProto; is "802.1x", must be one of 802.1q, 802.1ad`},
		{"spoof check is a boolean", `"spoofchk":true`, "spoofchk; "},
		{"spoof check", `"spoofchk":"yes"`, `spoofchk; is "yes", must be one of on, off`},
		{"trust", `"trust":"maybe"`, `trust; is "maybe"`},
		{"link state", `"link_state":"up"`, `link_state; is "up", must be one of auto, enable, disable`},
		{"mode", `"mode":"macvlan"`, `mode; is "macvlan", must be one of auto, move, ipvlan`},
		{"least rate below zero", `"min_tx_rate":-1`, "min_tx_rate; is -1"},
		{"most rate below zero", `"max_tx_rate":-1`, "max_tx_rate; is -1"},
		{"rates crossed", `"min_tx_rate":300,"max_tx_rate":200`, "min_tx_rate; is 300, more than max_tx_rate, which is 200"},
		{"MTU too small", `"mtu":67`, "mtu; is 67, must be between 68 and 65535"},
		{"MTU too big", `"mtu":65536`, "mtu; is 65536"},
		{"no MAC", `"mac":"hello"`, `mac; "hello": is no MAC address`},
		{"MAC of 8 bytes", `"mac":"02:00:00:00:00:00:00:01"`, "is not a MAC address of 6 bytes"},
		{"multicast MAC", `"mac":"01:00:5e:00:00:01"`, "is a multicast address"},
		{"zero MAC", `"mac":"00:00:00:00:00:00"`, "is the zero address"},
		{"MAC of the runtime", `"mac":"02:00:00:00:00:01","runtimeConfig":{"mac":"x"}`, `runtimeConfig.mac; "x"`},
		{"required setting that all have", `"requiredSettings":["vlan"]`, `requiredSettings; has "vlan"; what a driver may lack are spoofchk`},
		{"device ID is a path", `"deviceID":"../x"`, "deviceID; "},
		{"device ID begins with a slash", `"deviceID":"/3"`, "deviceID; "},
		{"device ID with spaces", `"deviceID":"eth 1"`, "deviceID; "},
		{"device ID too long", `"deviceID":"` + strings.Repeat("x", 65) + `"`, "deviceID; has 65 bytes, at most 64"},
		{"device-info file", `"runtimeConfig":{"CNIDeviceInfoFile":"x.json"}`, "runtimeConfig.CNIDeviceInfoFile; "},
		{"too many PFs", `"pfNames":["` + strings.Repeat(`a","`, maxPFs) + `a"]`, "pfNames; has 65 names"},
		{"IPAM type is a number", `"ipam":{"type":5}`, "ipam"},
		{"camel case", `"linkState":"auto"`, "linkState; no such field; this plugin has agentSocket"},
		{"misspelt", `"vlann":5`, "vlann; no such field"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parseConf(tt.conf)
			var ce *types.Error
			if !errors.As(err, &ce) || ce.Code != types.ErrInvalidNetworkConfig {
				t.Fatalf("%v, want code %d", err, types.ErrInvalidNetworkConfig)
			}
			if got := ce.Msg + "; " + ce.Details; !strings.Contains(got, tt.want) {
				t.Errorf("%q, want it to have %q", got, tt.want)
			}
		})
	}
}

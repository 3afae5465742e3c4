// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/smcr-io/kube-smcr/internal/records"
)

// NetConf is the configuration of the plugin in a CNI configuration list. The zero
// value of each field that CNI does not define is useful.
type NetConf struct {
	CNIVersion string `json:"cniVersion"`
	Name       string `json:"name"` // of the network
	Type       string `json:"type"`

	// DataDir holds the directory attachments. Default: DefaultDataDir.
	DataDir string `json:"dataDir"`
	// AgentSocket is the agent's Unix socket. Default: agent.sock in DataDir.
	AgentSocket string `json:"agentSocket"`
	// AgentTimeoutMilliseconds bounds the wait for the agent. Default: 2000.
	AgentTimeoutMilliseconds int `json:"agentTimeoutMilliseconds"`
	// Required makes ADD fail while the agent does not answer, or when the
	// record cannot be written.
	Required bool `json:"required"`
	// ReportStatus makes STATUS fail while new pods would not be attached.
	// Required does not imply it: see status.
	ReportStatus bool `json:"reportStatus"`

	DeviceConf

	raw        []byte // the whole configuration, for the IPAM plugin
	prevResult json.RawMessage
	valid      []types.GCAttachment
	hasValid   bool
}

// PluginType is the plugin's type in configurations, and so the name of its file.
const PluginType = "smcr-cni"

// DefaultDataDir is where plugin and agent meet.
const DefaultDataDir = "/run/kube-smcr"

// wireConf is NetConf with what container runtimes and libraries put into
// every plugin's configuration.
type wireConf struct {
	NetConf
	PrevResult       json.RawMessage       `json:"prevResult"`
	ValidAttachments *[]types.GCAttachment `json:"cni.dev/valid-attachments"`
}

// foreignKeys are the keys that CNI and its callers define, and those of the plugin
// sriov that say where it logs. A key that is neither among them nor in ownKeys is a
// mistake, and CNI allows a plugin to refuse it. A key with a slash belongs to the domain
// before the slash, and is never refused.
var foreignKeys = []string{
	"args", "capabilities", "cniVersions", "disableCheck", "disableGC", "dns", "ipMasq", "ipam",
	"logFile", "logLevel", "pciBusID", "prevResult", "runtimeConfig",
}

// ownKeys are the keys of NetConf.
var ownKeys = []string{
	"agentSocket", "agentTimeoutMilliseconds", "cniVersion", "dataDir", "deviceID", "link_state", "mac", "max_tx_rate",
	"min_tx_rate", "mode", "mtu", "name", "pfNames", "reportStatus", "required", "requiredSettings", "spoofchk", "trust",
	"type", "vlan", "vlanProto", "vlanQoS",
}

// ParseNetConf reads the configuration that a runtime passes to the plugin.
// Its errors are CNI errors that name the field.
func ParseNetConf(b []byte) (NetConf, error) {
	c, unknown, err := parseAnyNetConf(b)
	if len(unknown) > 0 {
		return NetConf{}, confError(unknown[0], "no such field; this plugin has %s", strings.Join(ownKeys, ", "))
	}
	return c, err
}

// parseAnyNetConf is ParseNetConf, but it accepts fields that this version of the plugin does not know,
// and returns their names.
func parseAnyNetConf(b []byte) (c NetConf, unknown []string, err error) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(b, &keys); err != nil {
		return NetConf{}, nil, types.NewError(types.ErrDecodingFailure, "network configuration is not a JSON object", err.Error())
	}
	for k := range keys {
		if !KnowsField(k) {
			unknown = append(unknown, k)
		}
	}
	slices.Sort(unknown)
	c, err = decodeNetConf(b)
	return c, unknown, err
}

// unmarshal is json.Unmarshal with a CNI error that names the field. After an error, v has those fields
// of b that fit.
func unmarshal(b []byte, v any) error {
	err := json.Unmarshal(b, v)
	if err == nil {
		return nil
	}
	field := "JSON"
	var te *json.UnmarshalTypeError
	if errors.As(err, &te) {
		field = te.Field
	}
	return confError(field, "%v", err)
}

// decodeNetConf returns what it could read together with its error.
func decodeNetConf(b []byte) (NetConf, error) {
	var w wireConf
	err := unmarshal(b, &w)
	c := w.NetConf
	c.raw = b
	if len(w.PrevResult) > 0 && !bytes.Equal(w.PrevResult, []byte("null")) {
		c.prevResult = w.PrevResult
	}
	if w.ValidAttachments != nil {
		c.valid, c.hasValid = *w.ValidAttachments, true
	}
	if c.DataDir == "" {
		c.DataDir = DefaultDataDir
	}
	if c.AgentSocket == "" {
		c.AgentSocket = filepath.Join(c.DataDir, "agent.sock")
	}
	if err == nil {
		err = c.validate()
	}
	if err == nil {
		err = c.DeviceConf.validate()
	}
	return c, err
}

// former makes of a configuration that ADD refuses one for attachments that end. It has only what DEL
// and GC need: what names the records and devices, and the IPAM plugin that gave the addresses. The
// error says that not even this can be read.
func (c NetConf) former() (NetConf, error) {
	var core struct {
		CNIVersion       string               `json:"cniVersion"`
		Name             string               `json:"name"`
		DataDir          string               `json:"dataDir"`
		AgentSocket      string               `json:"agentSocket"`
		IPAM             IPAMConf             `json:"ipam"`
		ValidAttachments []types.GCAttachment `json:"cni.dev/valid-attachments"`
	}
	if err := unmarshal(c.raw, &core); err != nil {
		return c, err
	}
	c.AgentTimeoutMilliseconds, c.DeviceConf = 0, c.DeviceConf.former()
	return c, c.validate()
}

// KnowsField tells whether the plugin accepts a field of this name in its
// configuration. A later version of the plugin may accept more.
func KnowsField(name string) bool {
	return slices.Contains(ownKeys, name) || slices.Contains(foreignKeys, name) || strings.Contains(name, "/")
}

func (c NetConf) validate() error {
	switch {
	case !filepath.IsAbs(c.DataDir):
		return confError("dataDir", "%q is not an absolute path", c.DataDir)
	case !filepath.IsAbs(c.AgentSocket):
		return confError("agentSocket", "%q is not an absolute path", c.AgentSocket)
	case len(c.AgentSocket) > maxSocketPath:
		return confError("agentSocket", "has %d bytes, a Unix socket's path has at most %d", len(c.AgentSocket), maxSocketPath)
	case c.AgentTimeoutMilliseconds < 0 || int64(c.AgentTimeoutMilliseconds) > maxAgentTimeout.Milliseconds():
		return confError("agentTimeoutMilliseconds", "is %d, must be between 0 (default, %d) and %d",
			c.AgentTimeoutMilliseconds, defaultAgentTimeout.Milliseconds(), maxAgentTimeout.Milliseconds())
	}
	return nil
}

// maxSocketPath is the size of sun_path, with its final zero byte.
const maxSocketPath = 107

func (c NetConf) agentTimeout() time.Duration {
	if c.AgentTimeoutMilliseconds == 0 {
		return defaultAgentTimeout
	}
	return time.Duration(c.AgentTimeoutMilliseconds) * time.Millisecond
}

func (c NetConf) store() Store { return NewStore(c.DataDir) }

// result is what the plugin reads of a CNI result; the versions it supports
// agree in these fields.
type result struct {
	CNIVersion string `json:"cniVersion"`
	Interfaces []struct {
		Name    string `json:"name"`
		Sandbox string `json:"sandbox"`
	} `json:"interfaces"`
	IPs []struct {
		Interface *int   `json:"interface"`
		Address   string `json:"address"`
	} `json:"ips"`
}

// addresses returns the addresses that the previous result gives to the pod's
// interface. An address without an interface is the pod's, too: old plugins do not list
// interfaces.
func (c NetConf) addresses(ifName string) ([]netip.Prefix, error) {
	if c.prevResult == nil {
		return nil, confError("prevResult", "is missing: list this plugin behind the one that makes the interface, or give it "+
			"a device (deviceID; with Multus by the annotation k8s.v1.cni.cncf.io/resourceName of the network)")
	}
	var r result
	if err := json.Unmarshal(c.prevResult, &r); err != nil {
		return nil, confError("prevResult", "%v", err)
	}
	if r.CNIVersion != "" && r.CNIVersion != c.CNIVersion {
		return nil, confError("prevResult.cniVersion", "is %q, the configuration's is %q", r.CNIVersion, c.CNIVersion)
	}
	var out []netip.Prefix
	for i, ip := range r.IPs {
		if n := ip.Interface; n != nil {
			if *n < 0 || *n >= len(r.Interfaces) {
				return nil, confError(fmt.Sprintf("prevResult.ips[%d].interface", i), "is %d, but there are %d interfaces", *n, len(r.Interfaces))
			}
			if it := r.Interfaces[*n]; it.Name != ifName || it.Sandbox == "" {
				continue
			}
		}
		p, err := netip.ParsePrefix(ip.Address)
		if err != nil {
			return nil, confError(fmt.Sprintf("prevResult.ips[%d].address", i), "%v", err)
		}
		out = append(out, p)
	}
	if len(out) > maxIPs {
		return nil, confError("prevResult.ips", "has %d addresses of %s, at most %d are allowed", len(out), ifName, maxIPs)
	}
	return out, nil
}

// parsePod reads the pod's identity from CNI_ARGS, as Kubernetes' runtimes
// write it. It is empty outside Kubernetes.
func parsePod(args string) (records.Pod, error) {
	var p records.Pod
	for pair := range strings.SplitSeq(args, ";") {
		if pair == "" {
			continue
		}
		k, v, ok := strings.Cut(pair, "=")
		if !ok || k == "" {
			return records.Pod{}, envError("CNI_ARGS", "%q is not a pair KEY=VALUE", pair)
		}
		var dst *string
		switch k {
		case "K8S_POD_NAMESPACE":
			dst = &p.Namespace
		case "K8S_POD_NAME":
			dst = &p.Name
		case "K8S_POD_UID":
			dst = &p.UID
		default:
			continue // others' arguments
		}
		if err := checkPodField(v); err != nil {
			return records.Pod{}, envError("CNI_ARGS", "%s: %v", k, err)
		}
		*dst = v
	}
	return p, nil
}

// checkPodField accepts every name and UID that Kubernetes accepts, and refuses
// characters that cannot be printed.
func checkPodField(v string) error {
	if len(v) > maxPodField {
		return fmt.Errorf("has %d bytes, at most %d are allowed", len(v), maxPodField)
	}
	for _, r := range v {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '.' && r != '_' {
			return fmt.Errorf("%q has the character %q", v, r)
		}
	}
	return nil
}

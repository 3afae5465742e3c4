// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

type schema struct {
	Ref         string            `json:"$ref"`
	Properties  map[string]schema `json:"properties"`
	Definitions map[string]schema `json:"definitions"`
	Additional  json.RawMessage   `json:"additionalProperties"`
}

// Every value of the schema is in values.yaml, with its default and meaning. The schema refuses fields that
// an object in values.yaml does not have.
func TestSchemaAndValuesSayTheSame(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(chartDir, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var root schema
	if err := json.Unmarshal(text, &root); err != nil {
		t.Fatal(err)
	}
	text, err = os.ReadFile(filepath.Join(chartDir, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := yaml.UnmarshalStrict(text, &values); err != nil {
		t.Fatal(err)
	}
	var compare func(path string, s schema, value any)
	compare = func(path string, s schema, value any) {
		if s.Ref != "" {
			return // the types of Kubernetes and of settings
		}
		object, isObject := value.(map[string]any)
		if !isObject {
			return
		}
		if s.Properties != nil && string(s.Additional) != "false" {
			t.Errorf("%s: the schema allows values that do not exist", path)
		}
		for key, p := range s.Properties {
			switch {
			case path == "" && key == "global":
			case path == ".monitoring" && key == "podMonitor": // of charts before this one
			case path == ".agent" && slices.Contains([]string{"seLinuxOptions", "appArmorProfile"}, key):
			default:
				v, ok := object[key]
				if !ok {
					t.Errorf("%s.%s: in the schema, but not in values.yaml", path, key)
				}
				compare(path+"."+key, p, v)
			}
		}
		for key := range object {
			if _, ok := s.Properties[key]; !ok && s.Properties != nil {
				t.Errorf("%s.%s: in values.yaml, but not in the schema", path, key)
			}
		}
	}
	compare("", root, values)
}

// The error about a value that does not exist or has the wrong form names the value. The error about values
// that contradict each other says what to do.
func TestRefused(t *testing.T) {
	for _, tt := range []struct{ name, set, want string }{
		{"unknown value", "agents.logLevel=debug", "additional properties 'agents' not allowed"},
		{"unknown value of the agent", "agent.logLvl=debug", "at '/agent': additional properties 'logLvl' not allowed"},
		{"file's field that is the chart's", "agent.dataDir=/tmp", "at '/agent': additional properties 'dataDir' not allowed"},
		{"unknown value of CNI", "agent.cni.bindir=/x", "at '/agent/cni': additional properties 'bindir' not allowed"},
		{"unknown field of a device", "agent.devices[0].soft.adress=node", "at '/agent/devices/0"},
		{"two kinds of address", "agent.devices[0].soft.interface=eth1,agent.devices[0].soft.address=node", "at '/agent/devices/0/soft'"},
		{"no device", "agent.devices=null", "at '/agent': missing property 'devices'"},
		{"requests and limits apart", "agent.resources.requests.cpu=1", "at '/agent/resources': additional properties 'requests' not allowed"},
		{"tag that is none", "image.tag=a:b", "at '/image/tag'"},
		{"digest that is none", "image.digest=abc", "at '/image/digest'"},
		{"size that is none", "agent.budgets.node.memory=1GB", "at '/agent/budgets/node/memory'"},
		{"size below 0", "agent.rmbe=-1", "at '/agent/rmbe'"},
		{"no processor", "agent.resources.cpu=0", "at '/agent/resources/cpu'"},
		{"no processor, as text", "agent.resources.cpu=0.0m", "at '/agent/resources/cpu'"},
		{"prefix that is too long", "agent.defaultPeers.cidrs={10.0.0.0/33}", "at '/agent/defaultPeers/cidrs/0'"},
		{"prefix of IPv6 that is too long", "agent.defaultPeers.cidrs={fc00::/129}", "at '/agent/defaultPeers/cidrs/0'"},
		{"address that is none", "agent.wire.peers={10.0.0.256/24}", "at '/agent/wire/peers/0'"},
		{"network that is there twice", "agent.defaultPeers.except={10.0.0.0/8,10.0.0.0/8}", "at '/agent/defaultPeers/except'"},
		{"enterprise ID that is there twice", "agent.eids={A,A}", "at '/agent/eids'"},
		{"device that is there twice", "agent.devices[0].soft.interface=e,agent.devices[1].soft.interface=e", "at '/agent/devices'"},
		{"address of a device that is none", "agent.devices[0].soft.address=auto", "at '/agent/devices/0"},
		{"port that is too high", "agent.metricsAddress=0.0.0.0:65536", "at '/agent/metricsAddress'"},
		{"port 0", "agent.metricsAddress=0.0.0.0:0", "at '/agent/metricsAddress'"},
		{"name for an address", "agent.metricsAddress=localhost:9464", "at '/agent/metricsAddress'"},
		{"duration that is none", "agent.drainTimeout=30", "at '/agent/drainTimeout'"},
		{"relative path", "agent.cni.binDir=opt/cni/bin", "at '/agent/cni/binDir'"},
		{"no controller", "controller.replicas=0", "at '/controller/replicas'"},
		{"word that is none", "crds.install=Yes", "at '/crds/install'"},
		{"enterprise ID in small letters", "agent.eids[0]=rack", "at '/agent/eids/0'"},
		{"resource without a vendor", "devicePlugin.otherResources[0]=vf", "at '/devicePlugin/otherResources/0'"},
		{"too many slots", "devicePlugin.slots=1001", "at '/devicePlugin/slots'"},
		{"text for a switch", "monitoring.serviceMonitor.enabled=yes", "at '/monitoring/serviceMonitor/enabled'"},

		{"budget larger than the container", "agent.budgets.node.memory=2GiB", "agent.budgets.node.memory (2GiB), agent.budgets.node.sockets (256MiB) and 256MiB for the agent itself do not fit into agent.resources.memory (1536Mi)"},
		{"sockets that leave too little", "agent.budgets.node.sockets=257MiB", "agent.budgets.node.sockets (257MiB) and 256MiB for the agent itself do not fit"},
		{"pod larger than node", "agent.budgets.pod.memory=1025MiB", "agent.budgets.pod.memory (1025MiB) is more than agent.budgets.node.memory (1GiB)"},
		{"ceiling larger than node", "agent.budgets.podMax.memory=1025MiB", "agent.budgets.podMax.memory (1025MiB) is not between those of agent.budgets.pod (256MiB) and agent.budgets.node (1GiB)"},
		{"ceiling smaller than pod", "agent.budgets.podMax.memory=255MiB", "agent.budgets.podMax.memory (255MiB) is not between"},
		{"hardly any relays", "agent.budgets.pod.relays=15", "at '/agent/budgets/pod/relays'"},
		{"no buffers", "agent.rmbe=0,agent.sendBuffer=0KiB", "agent.rmbe and agent.sendBuffer are both 0"},
		{"no room for a connection", "agent.budgets.pod.memory=4MiB", "agent.budgets.pod.memory (4MiB) is less than the agent.rmbe and agent.sendBuffer of 8 connections"},
		{"hardware that is not enabled", "agent.devices[0].rdma=mlx5_0", "hardware.enabled is false"},
		{"no update possible", "agent.update.maxSurge=0", "maxSurge and maxUnavailable are both 0"},
		{"both ways of update", "agent.update.maxUnavailable=1", "maxSurge and maxUnavailable are both set"},
		{"metrics that are nowhere", "monitoring.serviceMonitor.enabled=true,agent.metricsAddress=none", "agent.metricsAddress is none"},
		{"a certificate that nobody sees", "metrics.auth=false,metrics.tlsSecret=x", "metrics are plain http then"},
		{"what is called otherwise now", "monitoring.podMonitor.enabled=true", "monitoring.podMonitor is monitoring.serviceMonitor now"},
		{"interval that Prometheus does not know", "monitoring.serviceMonitor.interval=1.5m", "at '/monitoring/serviceMonitor/interval'"},
		{"no interval", "monitoring.serviceMonitor.interval=", "at '/monitoring/serviceMonitor/interval'"},
		{"metrics out of reach", "monitoring.serviceMonitor.enabled=true,agent.metricsAddress=127.0.0.1:9464", "agent.metricsAddress 127.0.0.1:9464, which is loopback"},
		{"label by which the agents are found", `commonLabels.app\.kubernetes\.io/part-of=platform`, "commonLabels: app.kubernetes.io/part-of is a label that the chart sets"},
		{"label of every object", `commonLabels.helm\.sh/chart=x`, "commonLabels: helm.sh/chart is a label that the chart sets"},
		{"label that selects the agents' pods", `agent.podLabels.app\.kubernetes\.io/name=rdma`, "agent.podLabels: app.kubernetes.io/name is a label that the chart sets"},
		{"label that selects the controllers' pods", `controller.podLabels.app\.kubernetes\.io/component=x`, "controller.podLabels: app.kubernetes.io/component is a label that the chart sets"},
		{"annotation that restarts the agents", "agent.podAnnotations.checksum/config=x", "agent.podAnnotations: checksum/config is an annotation that the chart sets"},
		{"annotation of the controllers", `controller.podAnnotations.kubectl\.kubernetes\.io/default-container=x`, "kubectl.kubernetes.io/default-container is an annotation that the chart sets"},
		{"variable that the agent needs", "agent.extraEnv[0].name=NODE_NAME,agent.extraEnv[0].value=x", "agent.extraEnv: NODE_NAME is a variable that the chart sets"},
		{"variable that is there twice", "agent.extraEnv[0].name=A,agent.extraEnv[0].value=x,agent.extraEnv[1].name=A,agent.extraEnv[1].value=y", "agent.extraEnv: A is there twice"},
		{"VFs without device plugin", "devicePlugin.vfs=true", "devicePlugin.vfs, but devicePlugin.enabled is false"},
		{"VFs that the agent cannot open", "devicePlugin.enabled=true,devicePlugin.vfs=true", "devicePlugin.vfs, but hardware.enabled is false"},
		{"veths without the kernel's datapath", "kernelPath.veth=true", "kernelPath.veth, but kernelPath.enabled is false"},
		{"device files for nobody", "hardware.resource=rdma/hca", "hardware.resource, but hardware.enabled is false"},
		{"requirement in an entry of somebody else", "agent.cni.install=false,agent.cni.required=true", "agent.cni.required, but agent.cni.install is false"},
		{"report in an entry of somebody else", "agent.cni.install=false,agent.cni.reportStatus=true", "agent.cni.reportStatus, but agent.cni.install is false"},
		{"VF of nobody", "multus.enabled=true", "multus.resourceName is empty"},
		{"addresses by nobody", "dra.enabled=true,dra.ipam.range=192.0.2.0/24", "dra.ipam has no type: name the IPAM plugin"},
		{"addresses of a node by nobody", "dra.enabled=true,dra.ipamOfNode.n1.range=x", "dra.ipamOfNode.n1 has no type: name the IPAM plugin"},
		{"addresses of a network by nobody", "multus.ipam.range=192.0.2.0/24", "multus.ipam has no type: name the IPAM plugin"},
		{"addresses for no claims", "dra.ipam.type=dhcp", "dra.ipam, but dra.enabled is false"},
		{"addresses in an entry of somebody else", "dra.enabled=true,dra.ipam.type=dhcp,agent.cni.install=false", "dra.ipam, but agent.cni.install is false"},
		{"IPAM that is no section", "dra.ipam=whereabouts", "at '/dra/ipam'"},
		{"IPAM plugin by its path", "dra.ipam.type=/opt/cni/bin/dhcp", "at '/dra/ipam/type'"},
		{"host-local without a range", "dra.ipam.type=host-local,dra.ipam.range=192.0.2.0/24", "missing property 'ranges'"},
		{"host-local with a list too few", "dra.ipam.type=host-local,dra.ipam.ranges[0].subnet=192.0.2.0/24", "at '/dra/ipam/ranges/0'"},
		{"host-local without a length", "dra.ipam.type=host-local,dra.ipam.subnet=192.0.2.0", "at '/dra/ipam/subnet'"},
		{"whereabouts without a range", "dra.ipam.type=whereabouts", "missing property 'range'"},
		{"whereabouts without a length", "multus.ipam.type=whereabouts,multus.ipam.range=192.0.2.0", "at '/multus/ipam/range'"},
		{"static without a length", "dra.ipam.type=static,dra.ipam.addresses[0].address=192.0.2.7", "at '/dra/ipam/addresses/0/address'"},
		{"addresses of a node that is none", "dra.ipamOfNode.N_1.type=dhcp", "at '/dra/ipamOfNode'"},
		{"devices of two kinds", "agent.devices[0].soft.address=node,agent.devices[1].rdma=mlx5_0", "all devices of a node must be of one kind"},
		{"devices of two kinds on a node", "agent.devicesOfNode.n1[0].soft.address=node,agent.devicesOfNode.n1[1].rdma=mlx5_0", "agent.devicesOfNode.n1: soft and rdma devices together"},
		{"devices of a node out of reach", "agent.devicesOfNode.n1[0].rdma=mlx5_0", "agent.devicesOfNode.n1 has rdma devices, but hardware.enabled is false"},
		{"devices of a node that is none", "agent.devicesOfNode.N_1[0].rdma=mlx5_0", "at '/agent/devicesOfNode'"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, complaint := helm(t, "template", release, chartDir, "--set", tt.set)
			switch {
			case complaint == "":
				t.Errorf("%s is taken:\n%.200s", tt.set, out)
			case !strings.Contains(complaint, tt.want):
				t.Errorf("%s: %s; want %q", tt.set, complaint, tt.want)
			}
		})
	}
}

// The chart takes every quantity and duration that Kubernetes takes, and calculates with them as with its own
// sizes.
func TestFormatsOfKubernetes(t *testing.T) {
	for _, tt := range []struct{ set, want string }{
		{"agent.budgets.node.memory=0.5Gi,agent.budgets.pod.memory=64Mi,agent.budgets.podMax.memory=128M", "memory: 0.5Gi"},
		{"agent.rmbe=64Ki,agent.sendBuffer=65536", "sendBuffer: 65536"},
		{"agent.resources.memory=1.5Gi,agent.resources.cpu=.5", "memory: 1.5Gi"},
		{"agent.resources.memory=2e9", `memory: "2e9"`},
		{"agent.drainTimeout=1h,hooks.uninstallTimeout=90s", "drainTimeout: 1h"},
		{"agent.metricsAddress=[::1]:65535", "'[::1]:65535'"},
		{"agent.defaultPeers.cidrs={::/0,192.0.2.1,64:ff9b::192.0.2.0/120}", "64:ff9b::192.0.2.0/120"},
	} {
		t.Run(tt.set, func(t *testing.T) {
			if out := template(t, "--set", tt.set); !strings.Contains(out, tt.want) {
				t.Errorf("%s: %q is not in what is rendered", tt.set, tt.want)
			}
		})
	}
	_, complaint := helm(t, "template", release, chartDir, "--set", "agent.budgets.node.memory=1.2Gi")
	if want := "agent.budgets.node.memory (1.2Gi), agent.budgets.node.sockets (256MiB) and 256MiB for the agent itself do not fit"; !strings.Contains(complaint, want) {
		t.Errorf("%q, want %q", complaint, want)
	}
}

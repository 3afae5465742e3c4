// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// envName is the name of an environment variable about a resource, as
// sriov-network-device-plugin makes it: it keeps the hyphens of the resource's name.
func envName(prefix, resource string) string {
	return prefix + strings.ToUpper(strings.NewReplacer("/", "_", ".", "_").Replace(resource))
}

// allocate is what one container gets for the IDs that kubelet gave it: environment
// variables with the names of the devices. It gets no device files, because the agent
// carries its connections.
func (o offer) allocate(resource string, ids []string) (*pluginapi.ContainerAllocateResponse, []Device, error) {
	var devices []Device
	for _, id := range ids {
		d, err := o.find(id)
		if err != nil {
			return nil, nil, err
		}
		if !slices.Contains(devices, d) {
			devices = append(devices, d)
		}
	}
	slices.SortFunc(devices, byRail) // kubelet's IDs have no order
	names := make([]string, len(devices))
	for i := range devices {
		names[i] = devices[i].ID
	}
	env := map[string]string{envName("SMCR_DEVICES_", strings.TrimPrefix(resource, "smcr.io/")): strings.Join(names, ",")}
	if resource == ResourceVF {
		info, err := vfInfo(names)
		if err != nil {
			return nil, nil, err
		}
		env[envName("PCIDEVICE_", resource)] = strings.Join(names, ",")
		env[envName("PCIDEVICE_", resource)+"_INFO"] = info
	}
	return &pluginapi.ContainerAllocateResponse{Envs: env}, devices, nil
}

// vfInfo is the value of PCIDEVICE_..._INFO: for each VF what is known about it, by
// provider.
func vfInfo(addresses []string) (string, error) {
	type generic struct {
		DeviceID string `json:"deviceID"`
	}
	type info struct {
		Generic generic `json:"generic"`
	}
	all := map[string]info{}
	for _, a := range addresses {
		all[a] = info{generic{a}}
	}
	b, err := json.Marshal(all)
	if err != nil {
		return "", fmt.Errorf("describe VFs %v: %w", addresses, err)
	}
	return string(b), nil
}

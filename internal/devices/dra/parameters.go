// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// Kind and version of a claim's parameters.
const (
	parametersVersion = DriverName + "/v1alpha1"
	parametersKind    = "DeviceParameters"
)

// parameters are the parameters that a claim may have for a request.
type parameters struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// InterfaceName is the name of the VF's interface in the pod.
	InterfaceName string `json:"interfaceName"`
}

// parametersOf returns the parameters for a request of a claim. Those of the claim replace
// those of the DeviceClass, which come first in the list.
func parametersOf(allocation *resourceapi.AllocationResult, request string) (parameters, error) {
	var found parameters
	for _, c := range allocation.Devices.Config {
		if c.Opaque == nil || c.Opaque.Driver != DriverName || len(c.Requests) > 0 && !applies(c.Requests, request) {
			continue
		}
		p, err := parseParameters(c.Opaque.Parameters.Raw)
		if err != nil {
			return found, fmt.Errorf("parameters of request %q (of the %s): %w", request, strings.TrimPrefix(string(c.Source), "From"), err)
		}
		found = p
	}
	return found, nil
}

func applies(requests []string, request string) bool {
	return slices.Contains(requests, request) || slices.Contains(requests, resourceclaim.BaseRequestRef(request))
}

func parseParameters(b []byte) (parameters, error) {
	var p parameters
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&p); err != nil {
		return p, fmt.Errorf("parse: %w: want apiVersion, kind and interfaceName", err)
	}
	if p.APIVersion != parametersVersion || p.Kind != parametersKind {
		return p, fmt.Errorf("apiVersion %.80q and kind %.80q, want apiVersion %q and kind %q", p.APIVersion, p.Kind, parametersVersion, parametersKind)
	}
	if p.InterfaceName != "" {
		if err := checkInterfaceName(p.InterfaceName); err != nil {
			return p, fmt.Errorf("interfaceName %.80q: %w", p.InterfaceName, err)
		}
	}
	return p, nil
}

// checkInterfaceName refuses names that the kernel refuses, and those of interfaces that
// every pod has.
func checkInterfaceName(name string) error {
	switch {
	case len(name) > maxInterfaceName:
		return fmt.Errorf("is longer than %d bytes", maxInterfaceName)
	case name == "." || name == "..":
		return errors.New("is no name of an interface")
	case name == "lo" || name == "eth0":
		return errors.New("every pod has an interface of that name")
	case strings.IndexFunc(name, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' || r == ':' }) >= 0:
		return errors.New("has a character that is not allowed in names of interfaces")
	}
	return nil
}

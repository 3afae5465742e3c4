// SPDX-License-Identifier: Apache-2.0

// Package crd holds the CustomResourceDefinitions of the objects of kube-smcr,
// which are generated from api/v1alpha1. The controller carries them and applies
// them when the chart is installed or upgraded.
//
// Limitations: none of them converts between versions.
package crd

import "embed"

//go:embed *.yaml
var files embed.FS

// Files returns the definitions, a YAML file each.
func Files() embed.FS { return files }

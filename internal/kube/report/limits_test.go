// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"github.com/smcr-io/kube-smcr/config/crd"
)

// TestLimits: what the comments of limits.go say of two limits together.
func TestLimits(t *testing.T) {
	for what, holds := range map[string]bool{
		"a snapshot that was asked for does not wait for the next one":   collectPause < collectEvery,
		"two renewals may get lost":                                      leaseDuration > 2*renewEvery,
		"a renewal that hangs for once is tried again in time":           renewEvery+renewTimeout+renewRetry+renewTimeout <= leaseDuration,
		"the pause after a renewal that failed grows up to the usual":    renewRetry < renewEvery,
		"the pause between writes for counters grows":                    countersFirst < countersMost,
		"an object that was written for its counters is not forgotten":   countersForget > countersMost,
		"an object is not written for its counters as for its state":     objectPause < countersFirst,
		"a node's first writes are as many as one link group per pod":    writesBurst > writesPerSecond,
		"an event that waits has not become too old":                     time.Duration(maxEvents/eventsPerSecond)*time.Second < maxEventAge,
		"one object leaves room for events of others":                    objectEventsBurst < eventsBurst,
		"all events that wait are remembered":                            maxEvents < maxRememberedEvent,
		"the pause after an error of the API server grows":               awayFirst < awayMost,
		"the pause after an error of an object grows":                    objectFirst < objectMost,
		"in an outage a call without an answer comes in time":            repliedOnly > awayMost+callTimeout,
		"the pause before a repair grows":                                repairFirst < repairMost,
		"a pod is shown as not attached before an event says so":         attachGrace < attachWarn,
		"policies are in force before a pod's connections count as told": policyDelay < fallbackAfter,
		"a pod is on plain TCP for long enough to be seen":               fallbackAfter < fallbackMemory,
		"a label's value has Kubernetes' length":                         maxLabelValue == validation.LabelValueMaxLength,
		"an object's name has Kubernetes' length":                        maxObjectName == validation.DNS1123SubdomainMaxLength,
	} {
		if !holds {
			t.Errorf("not so: %s", what)
		}
	}
}

// TestLimits_ofTheCRDs: the API server refuses an object of which one list or text is longer than its
// definition says, so the limits here are those of the definitions.
func TestLimits_ofTheCRDs(t *testing.T) {
	for _, tt := range []struct {
		file, path string // "[]" is the item of a list
		most       int64
		atMost     bool // less than the definition takes, on purpose
	}{
		{file: "smcrlinks", path: "links", most: maxLinks},
		{file: "smcrlinks", path: "lastError", most: maxLastError},
		{file: "smcrlinks", path: "conditions.[].message", most: maxMessage, atMost: true},
		{file: "smcrnodes", path: "devices", most: maxDevices},
		{file: "smcrnodes", path: "devices.[].detail", most: maxDetail},
		{file: "smcrnodes", path: "devices.[].otherAddresses", most: maxAddresses},
		{file: "smcrnodes", path: "podDevices", most: maxPodDevices},
		{file: "smcrnodes", path: "podDevices.[].detail", most: maxDetail},
		{file: "smcrnodes", path: "capabilities", most: maxCapabilities},
		{file: "smcrnodes", path: "wire.detail", most: maxDetail},
		{file: "smcrnodes", path: "conditions.[].message", most: maxMessage, atMost: true},
	} {
		t.Run(tt.file+"."+tt.path, func(t *testing.T) {
			data, err := crd.Files().ReadFile("smcr.io_" + tt.file + ".yaml")
			if err != nil {
				t.Fatal(err)
			}
			var def apiextensionsv1.CustomResourceDefinition
			if err := yaml.Unmarshal(data, &def); err != nil {
				t.Fatal(err)
			}
			at := def.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["status"]
			for _, field := range strings.Split(tt.path, ".") {
				switch {
				case field != "[]":
					at = at.Properties[field]
				case at.Items != nil:
					at = *at.Items.Schema
				}
			}
			takes := at.MaxItems
			if at.Type == "string" {
				takes = at.MaxLength
			}
			switch {
			case takes == nil:
				t.Errorf("the definition has no such limit: %+v", at)
			case *takes != tt.most && (!tt.atMost || *takes < tt.most):
				t.Errorf("the definition takes %d, the limit is %d", *takes, tt.most)
			}
		})
	}
}

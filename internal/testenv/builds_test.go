// SPDX-License-Identifier: Apache-2.0

package testenv

import "testing"

func TestInputVariable(t *testing.T) {
	for program, want := range map[string]string{
		"cmd/node-agent": "KUBE_SMCR_INPUT_cmd_node_agent",
		"github.com/smcr-io/kube-smcr/cmd/node-agent": "KUBE_SMCR_INPUT_cmd_node_agent",
		"pkg/rdma/verbs.test":                         "KUBE_SMCR_INPUT_pkg_rdma_verbs_test",
		"...":                                         "KUBE_SMCR_INPUT_product",
		"*":                                           "KUBE_SMCR_INPUT_checkout",
	} {
		if got := InputVariable(program); got != want {
			t.Errorf("%s: %s, want %s", program, got, want)
		}
	}
}

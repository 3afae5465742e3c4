// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"os"
	"strings"
)

// Builds says that the outcome of a test depends on programs that the test builds and runs, or on the tests of a package,
// which are a program, too: "cmd/node-agent", "pkg/rdma/verbs.test". "..." is all that images and charts are made of, "*" all files
// of the checkout, and "machine" the kernel and the machine's programs that tests run.
//
// go test remembers outcomes. One holds until the test's own code changes, or a file of the module or a variable of the
// environment that the test looked at; of what a test builds go knows nothing. So "make test" has a variable for each program, a
// hash of what it is made of (tools/inputs), and Builds looks at it.
func Builds(programs ...string) {
	for _, p := range programs {
		_ = os.Getenv(InputVariable(p))
	}
}

// InputVariable is the name of a program's variable: KUBE_SMCR_INPUT_cmd_node_agent.
func InputVariable(program string) string {
	name := strings.TrimPrefix(program, "github.com/smcr-io/kube-smcr/")
	switch name {
	case "...":
		name = "product"
	case "*":
		name = "checkout"
	}
	return "KUBE_SMCR_INPUT_" + strings.NewReplacer("/", "_", "-", "_", ".", "_").Replace(name)
}

// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// RuntimePackages are Debian's packages that the image has besides the programs:
// what node-agent is linked with, and the drivers that libibverbs loads.
func RuntimePackages() []string {
	return []string{"libc6", "libibverbs1", "ibverbs-providers", "libnl-3-200", "libnl-route-3-200"}
}

// verbsHeader is there if node-agent can be built with hardware verbs.
const verbsHeader = "/usr/include/infiniband/verbs.h"

// runtimeFiles are the libraries of these packages as this machine has them. On
// one without them, or without a C compiler, node-agent is static, without
// hardware verbs, and needs none.
func runtimeFiles(ctx context.Context) (files []File, verbs bool, err error) {
	for _, tool := range []string{"gcc", "dpkg"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, false, nil //nolint:nilerr // it is not needed
		}
	}
	if _, err := os.Stat(verbsHeader); err != nil {
		return nil, false, nil //nolint:nilerr // likewise
	}
	for _, p := range RuntimePackages() {
		out, err := exec.CommandContext(ctx, "dpkg", "-L", p).CombinedOutput()
		if err != nil {
			return nil, false, fmt.Errorf("list the files of %s (tools/deps.sh runtime installs it): %w\n%s", p, err, out)
		}
		for name := range strings.Lines(string(out)) {
			if name = strings.TrimSpace(name); isRuntime(name) {
				files = append(files, File{Name: name, Source: name})
			}
		}
	}
	return files, true, nil
}

// isRuntime picks the shared libraries and the list of drivers.
func isRuntime(name string) bool {
	if strings.HasPrefix(name, "/etc/libibverbs.d/") {
		return true
	}
	info, err := os.Stat(name)
	return err == nil && info.Mode().IsRegular() && strings.Contains(name, ".so") && !strings.Contains(name, "/gconv/") && !strings.Contains(name, "/audit/")
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// unseen says of a network namespace that the agent does not find whether it may be there all
// the same, where the agent does not look. err is why it was not opened. The CNI plugin, which
// runs on the node itself, writes the path of a namespace without symbolic links in its
// directory (as in /run/netns/a for /var/run/netns/a). So, if the directory is a link here, or is not here, the
// agent's container has another file system there than the node. The usual reason is a node
// whose /var/run is a directory of its own: runtimes put the namespaces into /var/run/netns,
// and the agent has the node's /run/netns.
func unseen(path string, err error) error {
	if !errors.Is(err, linux.ErrGone) || strings.HasPrefix(path, "/proc/") || strings.HasPrefix(path, cgroupPrefix) {
		return err
	}
	dir := filepath.Dir(path)
	here, rerr := filepath.EvalSymlinks(dir)
	switch {
	case errors.Is(rerr, fs.ErrNotExist):
		return fmt.Errorf("%w, or out of the agent's sight: the agent has no %s. Let the container runtime keep network namespaces in /run/netns, "+
			"as it does by default, or mount the directory for the agent", err, dir)
	case rerr == nil && here != dir:
		return fmt.Errorf("%w, or out of the agent's sight: to the agent %s is %s, on the node it is a directory of its own. "+
			"Make it the same there (/var/run a link to /run), and start the container runtime and the pod anew", err, dir, here)
	}
	return err
}

// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseHierarchies(t *testing.T) {
	tests := []struct {
		name, mountinfo string
		want            []hierarchy
	}{
		{
			name: "version 2",
			mountinfo: "24 1 254:0 / / rw - ext4 /dev/vda rw\n" +
				"30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n",
			want: []hierarchy{{path: "/sys/fs/cgroup", v2: true}},
		},
		{
			name: "hybrid, with options of the first mount",
			mountinfo: "29 24 0:25 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n" +
				"30 29 0:26 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n" +
				"31 29 0:27 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset,clone_children,release_agent=/x\n" +
				"32 29 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n" +
				"33 29 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
			want: []hierarchy{
				{path: "/sys/fs/cgroup/cpu,cpuacct", options: "cpu,cpuacct"},
				{path: "/sys/fs/cgroup/cpuset", options: "cpuset"},
				{path: "/sys/fs/cgroup/systemd", options: "none,name=systemd"},
				{path: "/sys/fs/cgroup/unified", v2: true},
			},
		},
		{name: "elsewhere", mountinfo: "33 29 0:29 / /mnt/cgroup rw - cgroup2 cgroup2 rw\n"},
		{name: "junk", mountinfo: "x\n\n - \n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, parseHierarchies(tt.mountinfo), cmp.AllowUnexported(hierarchy{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

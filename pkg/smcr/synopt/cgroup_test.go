// SPDX-License-Identifier: Apache-2.0

package synopt

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	hybridCgroup = "9:name=systemd:/\n8:pids:/\n4:memory:/agent\n1:cpu:/\n0::/system.slice/agent.service\n"

	hybridMounts = `31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
38 31 0:35 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate
`
)

func TestOwnCgroup(t *testing.T) {
	tests := []struct {
		name, text, want string
		wantErr          bool
	}{
		{name: "hybrid", text: hybridCgroup, want: "/system.slice/agent.service"},
		{name: "v2 only, root", text: "0::/\n", want: "/"},
		{name: "colon in the name", text: "0::/a:b\n", want: "/a:b"},
		{name: "v1 only", text: "4:memory:/agent\n", wantErr: true},
		{name: "empty", wantErr: true},
		{name: "no path", text: "0::\n", wantErr: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ownCgroup(tt.text)
			if (err != nil) != tt.wantErr || got != tt.want {
				t.Errorf("ownCgroup() = %q, %v; want %q, error %v", got, err, tt.want, tt.wantErr)
			}
		})
	}
}

func TestCgroupDirs(t *testing.T) {
	v2 := func(root, point string) string {
		return "38 31 0:35 " + root + " " + point + " rw,nosuid - cgroup2 cgroup rw\n"
	}
	tests := []struct {
		name, mounts, own string
		want              []string
	}{
		{name: "hybrid", mounts: hybridMounts, own: "/system.slice/agent.service", want: []string{"/sys/fs/cgroup/unified/system.slice/agent.service"}},
		{name: "v2 only", mounts: v2("/", "/sys/fs/cgroup"), own: "/", want: []string{"/sys/fs/cgroup"}},
		{name: "container in the host's cgroup namespace", mounts: v2("/kubepods/pod1/c1", "/sys/fs/cgroup"), own: "/kubepods/pod1/c1", want: []string{"/sys/fs/cgroup"}},
		{name: "child of the mount's root", mounts: v2("/kubepods", "/cg"), own: "/kubepods/pod1/c1", want: []string{"/cg/pod1/c1"}},
		{name: "name that only begins like the root", mounts: v2("/kube", "/cg"), own: "/kubepods/pod1"},
		{name: "another part of the hierarchy", mounts: v2("/other", "/cg"), own: "/kubepods/pod1"},
		{name: "several mounts", mounts: v2("/other", "/a") + v2("/", "/b") + v2("/x", "/c"), own: "/x", want: []string{"/b/x", "/c"}},
		{name: "mount from outside of the cgroup namespace", mounts: v2("/../..", "/sys/fs/cgroup"), own: "/"},
		{name: "own cgroup outside of the cgroup namespace", mounts: v2("/", "/sys/fs/cgroup"), own: "/../sibling"},
		{name: "both outside", mounts: v2("/..", "/sys/fs/cgroup"), own: "/../sibling", want: []string{"/sys/fs/cgroup/sibling"}},
		{name: "further outside than the mount", mounts: v2("/..", "/sys/fs/cgroup"), own: "/../../other"},
		{name: "space in the mount point", mounts: v2("/", `/mnt/c\040g`), own: "/a", want: []string{"/mnt/c g/a"}},
		{name: "v1 only", mounts: "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n", own: "/"},
		{name: "junk", mounts: "x\n - cgroup2 \n1 2 - cgroup2 a b\n", own: "/"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, cgroupDirs(tt.mounts, tt.own)); diff != "" {
				t.Errorf("cgroupDirs() (-want +got):\n%s", diff)
			}
		})
	}
}

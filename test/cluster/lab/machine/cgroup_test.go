// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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

// A cluster that is started at a low priority yields as a whole.
func TestWeigh(t *testing.T) {
	for _, tt := range []struct {
		name, file string
		nice       int
		want       string
	}{
		{"version 2", "cpu.weight.nice", 19, "19"},
		{"version 1", "cpu.shares", 19, "15"}, // what Linux gives a process of niceness 19
		{"version 1, a little", "cpu.shares", 5, "336"},
		{"version 1, more than others", "cpu.shares", -5, "3125"},
		{"another controller", "cpuset.cpus", 19, "0-1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, tt.file), []byte("0-1"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := weigh(dir, tt.nice); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(filepath.Join(dir, tt.file))
			if err != nil || string(got) != tt.want {
				t.Errorf("%s is %q, %v; want %q", tt.file, got, err, tt.want)
			}
			if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
				t.Errorf("files %v, %v", files, err)
			}
		})
	}
}

func TestNiceness(t *testing.T) {
	out, err := exec.Command("nice").Output() // says its own, which it has from us
	if err != nil {
		t.Fatal(err)
	}
	if got, err := niceness(); err != nil || fmt.Sprintln(got) != string(out) {
		t.Errorf("niceness %d, %v; want %s", got, err, out)
	}
}

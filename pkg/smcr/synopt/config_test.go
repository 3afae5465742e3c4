// SPDX-License-Identifier: Apache-2.0

package synopt

import (
	"errors"
	"strings"
	"testing"
)

func TestConfig_Validate(t *testing.T) {
	tests := []struct {
		name    string
		cfg     Config
		wantErr string
	}{
		{name: "own cgroup", cfg: Config{Mark: 1}},
		{name: "named cgroup", cfg: Config{Mark: 0xffffffff, CgroupPath: "/sys/fs/cgroup/agent"}},
		{name: "no mark", wantErr: "mark is 0"},
		{name: "relative path", cfg: Config{Mark: 1, CgroupPath: "agent"}, wantErr: `"agent" is not absolute`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.cfg.Validate()
			if tt.wantErr == "" {
				if err != nil {
					t.Errorf("Validate() = %v", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.wantErr) {
				t.Errorf("Validate() = %v, want an error with %q", err, tt.wantErr)
			}
		})
	}
}

func TestUnsupportedError(t *testing.T) {
	cause := errors.New("operation not permitted")
	err := error(&UnsupportedError{What: "load the eBPF program", Need: "CAP_BPF", Err: cause})
	if !errors.Is(err, cause) {
		t.Error("the cause cannot be found")
	}
	if got, want := err.Error(), "load the eBPF program: operation not permitted: needs CAP_BPF"; got != want {
		t.Errorf("Error() = %q, want %q", got, want)
	}
}

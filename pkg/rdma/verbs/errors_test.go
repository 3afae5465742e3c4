// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func TestVerbError(t *testing.T) {
	for errno, want := range map[syscall.Errno]error{
		syscall.ENOMEM: rdma.ErrNoResources, syscall.ENOSPC: rdma.ErrNoResources, syscall.EMFILE: rdma.ErrNoResources,
		syscall.EINVAL: rdma.ErrInvalid, syscall.EOPNOTSUPP: rdma.ErrNotSupported, syscall.EBUSY: rdma.ErrBusy,
		syscall.EIO: rdma.ErrClosed, syscall.ENODEV: rdma.ErrClosed, syscall.ETIMEDOUT: syscall.ETIMEDOUT,
	} {
		err := verbError(fmt.Errorf("call: %w", errno))
		if !errors.Is(err, want) || !errors.Is(err, errno) {
			t.Errorf("%v: %v, want %v", errno, err, want)
		}
	}
	if err := verbError(io.EOF); !errors.Is(err, io.EOF) {
		t.Errorf("another error: %v", err)
	}
}

func TestConfig_Validate(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  Config
		want string // "": valid
	}{
		"name is enough":    {Config{Name: "rxe0"}, ""},
		"everything":        {Config{Name: "rxe0", Port: 2, Addr: netip.MustParseAddr("fd00::1"), GIDType: rdma.GIDTypeRoCEv1}, ""},
		"no name":           {Config{}, "name is empty"},
		"no single address": {Config{Name: "a", Addr: netip.MustParseAddr("224.0.0.1")}, "224.0.0.1 is not a unicast address"},
		"type":              {Config{Name: "a", GIDType: rdma.GIDTypeIWARP}, "GID type iWARP"},
	} {
		err := c.cfg.Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

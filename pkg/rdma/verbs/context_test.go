// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// A path that cannot be asked for, as the device makes no address handles, is no reason against it: the
// transition to RTR asks.
func TestContext_ResolvePath(t *testing.T) {
	d := &Device{name: "noah0"}
	d.now.Store(&portNow{gids: []rdma.GIDEntry{row(3, rdma.GIDTypeRoCEv2, "192.0.2.1")}})
	c := &deviceContext{dev: d}
	for _, tt := range []struct{ errno, want syscall.Errno }{
		{syscall.EOPNOTSUPP, 0}, {syscall.ENOSYS, 0}, {syscall.ETIMEDOUT, syscall.ETIMEDOUT}, {syscall.ENOMEM, syscall.ENOMEM},
	} {
		d.Fail(func(call string) error {
			if call != "create_ah" {
				t.Errorf("call of %s", call)
			}
			return tt.errno
		})
		err := c.ResolvePath(rdma.Path{SGIDIndex: 3, DGID: rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.2"))})
		if (err != nil) != (tt.want != 0) || err != nil && !errors.Is(err, tt.want) {
			t.Errorf("%v: %v", tt.errno, err)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// Validate says all that is wrong at once.
func TestConfig_validateSaysAll(t *testing.T) {
	err := Config{
		Addr: netip.MustParseAddr("fe80::1"), MTU: 6, Dir: "devices", SocketBufferBytes: -1, WindowPackets: rocev2.MaxWindow + 1, Receivers: 3,
	}.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"name is empty", "fe80::1%eth0", "path MTU code 6", `"devices" is not an absolute path`, "socket buffer of -1", "window of", "3 receivers"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not have %q", err, want)
		}
	}
}

func TestConfig_defaults(t *testing.T) {
	c := Config{Name: "x", Addr: netip.MustParseAddr("192.0.2.1")}
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
	if d := c.withDefaults(); d.Port != rocev2.Port || d.SocketBufferBytes != defaultSocketBufferBytes {
		t.Errorf("defaults %+v", d)
	}
	for processors, want := range map[int]int{1: 1, 2: 2, 3: 2, 4: 4, 64: 4} {
		before := runtime.GOMAXPROCS(processors)
		if d := c.withDefaults(); d.Receivers != want {
			t.Errorf("%d receivers with %d processors, want %d", d.Receivers, processors, want)
		}
		runtime.GOMAXPROCS(before)
	}
	c.Port, c.SocketBufferBytes, c.Receivers = 7, 8, 1
	if d := c.withDefaults(); d.Port != 7 || d.SocketBufferBytes != 8 || d.Receivers != 1 {
		t.Errorf("what was said is replaced: %+v", d)
	}
}

// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// portEnv has the test program try to take a port as UDPPort does, and say what came of it.
const portEnv = "TESTENV_TEST_PORT"

// A port is one process's until its end, and free there on other addresses.
func TestUDPPort(t *testing.T) {
	if port := os.Getenv(portEnv); port != "" {
		n, _ := strconv.Atoi(port)
		_, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: n})
		t.Logf("taken: %v", err != nil)
		return
	}
	seen := map[uint16]bool{}
	for range 3 {
		port := UDPPort()
		if seen[port] {
			t.Errorf("port %d was given before", port)
		}
		seen[port] = true
		cmd := exec.Command(os.Args[0], "-test.run=^TestUDPPort$", "-test.v")
		cmd.Env = append(os.Environ(), portEnv+"="+strconv.Itoa(int(port)))
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "taken: true") {
			t.Errorf("another process, port %d: %v\n%s", port, err, out)
		}
		c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr("127.99.0.1"), port)))
		if err != nil {
			t.Errorf("on another address: %v", err)
			continue
		}
		_ = c.Close()
	}
}

// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
)

// Ports of [UDPPort] are below those that Linux chooses itself, so that a socket without a
// port of its own does not meet them.
const (
	firstPort = 20_000
	lastPort  = 32_767
)

// held are the sockets by which this process has its ports. They are open as long as it lives.
var held struct {
	mu    sync.Mutex // guards what follows
	conns []*net.UDPConn
}

// UDPPort returns a port of UDP that is this process's until its end: no other run of tests on the
// machine gets it, on none of the loopback addresses. What needs one port on several addresses
// asks once.
//
// One socket on 127.0.0.1 says whose a port is; that address is therefore not one for tests.
func UDPPort() uint16 {
	const tries = 1000
	var err error
	for range tries {
		var c *net.UDPConn
		port := firstPort + rand.IntN(lastPort-firstPort+1)
		if c, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}); err == nil {
			held.mu.Lock()
			defer held.mu.Unlock()
			held.conns = append(held.conns, c)
			return uint16(port)
		}
	}
	panic(fmt.Sprintf("testenv: no port of UDP is free: %v", err))
}

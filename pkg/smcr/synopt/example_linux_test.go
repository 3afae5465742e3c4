// SPDX-License-Identifier: Apache-2.0

package synopt_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// TestExample runs the example where it can work: an example itself cannot be
// skipped.
func TestExample(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.BPF)
	Example()
}

// A client and a server of one process, both with the option.
func Example() {
	opt, err := synopt.Open(synopt.Config{Mark: 0x534d43})
	if unsupported := (*synopt.UnsupportedError)(nil); errors.As(err, &unsupported) {
		fmt.Println("every connection stays plain TCP; needed:", unsupported.Need)
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = opt.Close() }()

	lc := net.ListenConfig{Control: opt.ControlListen}
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = l.Close() }()

	d := net.Dialer{Control: opt.ControlDial}
	client, err := d.Dial("tcp", l.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	offered, err := opt.PeerOffered(client.(*net.TCPConn))
	fmt.Println("the SYN-ACK carried the option:", offered, err)

	server, err := l.Accept()
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = server.Close() }()
	offered, err = opt.SYNOffered(server.(*net.TCPConn))
	fmt.Println("the SYN carried the option:", offered, err)
}

// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

const (
	// suiteTimeout bounds the run of a test in the guest, such as the conformance suite. On a busy machine some took three minutes.
	suiteTimeout = 8 * time.Minute
	// softAddr is the address of the software device in the guest.
	softAddr = "10.0.0.50"
)

// left are the cases of the suite that siw cannot pass:
//
//	Permissions, PartOfRegionRights        siw lets peers read memory without the right to read (TestSIW_rights)
//	AddressesTellNothing, DomainIsolation  an address of memory is that in the process, the same in all domains
//	ResetAndReconnect                      siw never connects a queue pair a second time
//	QueueFull                              posting carries a request out at once, so no queue is ever full
//
// leftTo is a case that siw cannot pass when softiwarp is the requester: siw does not tell a peer of every READ that it refuses.
const (
	left   = "Permissions|PartOfRegionRights|AddressesTellNothing|DomainIsolation|ResetAndReconnect|QueueFull"
	leftTo = "WrongKeys"
)

// testSuite runs the conformance suite in the guest, with siw at both ends, and with softiwarp at one of them, at a second
// address of the same interface.
func (b *bed) testSuite(t *testing.T) {
	const cases = 44 - 6 // with three directions each, of which some are skipped for what siw lacks
	b.inGuest(t, "TestSIW_conformance", "^TestSIW_conformance$/^("+left+")$|^TestSIW_conformance$/^("+leftTo+")$/^softToSIW$", 4*cases-16+1, sendsFirst)
}

// testRights checks in the guest what siw and softiwarp let each other do with memory.
func (b *bed) testRights(t *testing.T) {
	const cases = 8
	b.inGuest(t, "TestSIW_rights", "", 1+3*cases, sendsFirst)
}

// testPrivateData runs the tests of what programs tell each other while they connect, and of connections that get no answer.
func (b *bed) testPrivateData(t *testing.T) {
	const directions, ways, more = 3, 3 + 2, 5
	b.inGuest(t, "TestSIW_connect", "", 1+directions*(1+ways)+more, sendsFirst)
}

// testSDP runs connections of SDP, on siw as Linux has it.
func (b *bed) testSDP(t *testing.T) {
	const directions, each, netTest = 3, 1 + 20 + 1, 6 // the scripts, and Buffers
	b.inGuest(t, "TestSIW_sdp", "", 1+directions*each+netTest, nil)
}

// sendsFirst has siw, where it connects, send a message of its own first, so that either side may send at once.
var sendsFirst = settings{"peer_to_peer": "1"}

// inGuest runs a test of pkg/rdma/verbs in the guest, except its parts that match skip. At least so many tests, parts included, must
// pass. 32 run in parallel on the one processor, because most of them wait most of the time.
func (b *bed) inGuest(t *testing.T, test, skip string, least int, siw settings) {
	t.Helper()
	program, err := b.lab.Build(t.Context(), "github.com/smcr-io/kube-smcr/pkg/rdma/verbs", lab.BuildOptions{CGO: true, Test: true})
	if err != nil {
		t.Fatal(err)
	}
	b.set(t, siw)
	soft := netip.MustParseAddr(softAddr)
	if _, err := b.guest.Run(t.Context(), "ip", "addr", "replace", soft.String()+"/24", "dev", b.guest.NetDev(0)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), suiteTimeout)
	defer cancel()
	out, err := b.guest.Shell(ctx, fmt.Sprintf(
		"%s=siw0 %s=%s VERBS_SIW_ADDR=%v VERBS_SOFT_ADDR=%v %s -test.v -test.timeout=%v -test.parallel=32 -test.run='^%s$' -test.skip='%s' 2>&1",
		testenv.RDMADeviceEnv, testenv.RequireEnv, testenv.RDMADevice, b.guest.Addr(0), soft, program, suiteTimeout*3/4, test, skip))
	if n := strings.Count(out, "--- PASS: "); err == nil && n < least {
		err = fmt.Errorf("%d tests passed, want %d or more", n, least)
	}
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

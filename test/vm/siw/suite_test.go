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
	// suiteTimeout bounds the run of the conformance suite.
	suiteTimeout = 2 * time.Minute
	// softAddr is that of the software device in the guest.
	softAddr = "10.0.0.50"
)

// left are the cases that are left out: those that are about one device, and not about what two
// say to each other; that ask nothing of streams, for which one path MTU is as good as another; that reset a
// queue pair, which siw cannot connect again; and about faults, of which siw tells less than the suite asks
// for: testEnds has those that are on the wire. Through libibverbs siw wakes nobody for solicited receives alone, and takes
// more requests than a full queue should.
const left = "Attributes|States|IllegalTransitions|Destruction|QueueFull|Overrun|NotifySolicited|IdlePoll|" +
	"Operations(256|512|2048|4096)|PSNWraps|ResetAndReconnect|" +
	"WrongKeys|Permissions|DomainIsolation|Receive.*|RetryExceeded|FlushOnError|RegionClosedUnderWrites|" +
	"AddressesTellNothing|SharedMemory|ClosedDuringTraffic|QPFatalEvent|PartOfRegion.*|SendInvalidate|SendImm"

// testSuite runs the conformance suite in the guest, with siw as one device, through libibverbs
// and rdma_cm, and softiwarp as the other one, at a second address of the same interface.
func (b *bed) testSuite(t *testing.T) {
	const cases = 13 // with two directions each
	b.inGuest(t, "TestSIW_conformance", left, 1+3*cases)
}

// testRights runs what siw and softiwarp let each other do with memory.
func (b *bed) testRights(t *testing.T) {
	const cases = 8
	b.inGuest(t, "TestSIW_rights", "none", 1+3*cases)
}

// testPrivateData runs what programs say to each other while they connect.
func (b *bed) testPrivateData(t *testing.T) {
	const cases = 3 + 3 + 2
	b.inGuest(t, "TestSIW_connect", "none", 1+cases)
}

// inGuest runs a test of pkg/rdma/verbs in the guest, without some of its parts: at least so many
// tests are to pass.
func (b *bed) inGuest(t *testing.T, test, skip string, least int) {
	t.Helper()
	program, err := b.lab.Build(t.Context(), "github.com/smcr-io/kube-smcr/pkg/rdma/verbs", lab.BuildOptions{CGO: true, Test: true, Tags: []string{"smcrsiw"}})
	if err != nil {
		t.Fatal(err)
	}
	b.set(t, settings{"peer_to_peer": "1"}) // either side may send first
	soft := netip.MustParseAddr(softAddr)
	if _, err := b.guest.Run(t.Context(), "ip", "addr", "replace", soft.String()+"/24", "dev", b.guest.NetDev(0)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), suiteTimeout)
	defer cancel()
	out, err := b.guest.Shell(ctx, fmt.Sprintf(
		"%s=siw0 %s=%s VERBS_SIW_ADDR=%v VERBS_SOFT_ADDR=%v %s -test.v -test.timeout=%v -test.run='^%s$' -test.skip='^%s$/^(%s)$' 2>&1",
		testenv.RDMADeviceEnv, testenv.RequireEnv, testenv.RDMADevice, b.guest.Addr(0), soft, program, suiteTimeout*3/4, test, test, skip))
	if n := strings.Count(out, "--- PASS: "); err == nil && n < least {
		err = fmt.Errorf("%d tests passed, want %d or more", n, least)
	}
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

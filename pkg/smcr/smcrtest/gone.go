// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// gone is what is left of a link group when its process has ended, or there is
// before it exists: nothing.
type gone struct {
	dialectOf llc.Dialect
	name      string
	state     condition // forming: it is not there yet
}

func (g *gone) String() string                                    { return g.name + ", gone" }
func (g *gone) firstEndpoint() linkgroup.Endpoint                 { return linkgroup.Endpoint{} }
func (g *gone) connectPeer(time.Time, linkgroup.Endpoint)         {}
func (g *gone) open(time.Time, string, *linkgroup.Endpoint) error { return errPathDead }
func (g *gone) localEndpoint(string) linkgroup.Endpoint           { return linkgroup.Endpoint{} }
func (g *gone) confirmed(string) (bool, error)                    { return false, errPathDead }
func (g *gone) rmbe(string) linkgroup.RMBE                        { return linkgroup.RMBE{} }
func (g *gone) activate(time.Time, string, linkgroup.RMBE, linkgroup.Endpoint) error {
	return errPathDead
}
func (g *gone) abandon(time.Time, string, bool)                 {}
func (g *gone) condition() condition                            { return g.state }
func (g *gone) usable() bool                                    { return false }
func (g *gone) giveUp(time.Time)                                { g.state = dead }
func (g *gone) terminate(time.Time)                             {}
func (g *gone) recv(time.Time, int, []byte) error               { return nil }
func (g *gone) sent(time.Time, int, uint64)                     {}
func (g *gone) place(int, string, uint32, uint64, []byte) error { return errPathDead }
func (g *gone) linkFailed(time.Time, int, error)                {}
func (g *gone) port(time.Time, int, bool)                       {}
func (g *gone) timeout(time.Time)                               {}
func (g *gone) nextTimeout() (time.Time, bool)                  { return time.Time{}, false }
func (g *gone) poll(time.Time, func(int, work)) bool            { return false }
func (g *gone) end(string) end                                  { return nil }
func (g *gone) links() []linkView                               { return nil }
func (g *gone) dialect() llc.Dialect                            { return g.dialectOf }
func (g *gone) sendLimit() int                                  { return 0 }
func (g *gone) leaks(func(string) bool) []string                { return nil }

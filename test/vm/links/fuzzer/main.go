// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// optionMark selects our sockets in our cgroup.
const optionMark = 0x7610

// round is a line of the output.
type round struct {
	Round  int    `json:"round"`
	Seed   uint64 `json:"seed"`
	Attack string `json:"attack"`
	// Groups is how many link groups of the server the round took, that of the
	// attack last.
	Groups int `json:"groups"`
	// Sent counts work requests of the attack, Done those that the peer's device
	// took, and Refused those that it did not.
	Sent    int    `json:"sent"`
	Done    int    `json:"done"`
	Refused int    `json:"refused"`
	Err     string `json:"err,omitempty"` // why the attack could not begin
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "fuzzer:", err)
		os.Exit(1)
	}
}

type device interface {
	rdma.Device
	Close() error
}

func openDevice(name string) (device, error) {
	kind, what, _ := strings.Cut(name, ":")
	switch kind {
	case "soft":
		addr, err := netip.ParseAddr(what)
		if err != nil {
			return nil, err
		}
		return soft.Open(soft.Config{Name: name, Addr: addr})
	case "verbs":
		return verbs.Open(verbs.Config{Name: what})
	}
	return nil, fmt.Errorf("-device %q: want soft:ADDRESS or verbs:NAME", name)
}

func run(args []string) (err error) {
	f := flag.NewFlagSet("fuzzer", flag.ContinueOnError)
	name := f.String("device", "", "soft:ADDRESS or verbs:NAME")
	to := f.String("to", "", "address and port of the server")
	ueid := f.String("eid", "SMCV2-DEFAULT-UEID", "enterprise ID")
	seed := f.Uint64("seed", 1, "what all that happens follows from")
	rounds := f.Int("rounds", len(attacks), "number of rounds")
	if err := f.Parse(args); err != nil {
		return err
	}
	eid, err := clc.ParseUEID(*ueid)
	if err != nil {
		return err
	}
	d, err := openDevice(*name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	o, err := synopt.Open(synopt.Config{Mark: optionMark})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, o.Close()) }()
	out := json.NewEncoder(os.Stdout)
	failed := 0
	for i := range *rounds {
		rnd := rand.New(rand.NewPCG(*seed, uint64(i))) //nolint:gosec // a seed that repeats is the point
		a := attacks[i%len(attacks)]
		r := round{Round: i, Seed: *seed, Attack: a.name}
		if err := one(d, o, eid, *to, rnd, a, &r); err != nil {
			r.Err = err.Error()
			failed++
		}
		if err := out.Encode(r); err != nil {
			return err
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d rounds could not begin", failed, *rounds)
	}
	return nil
}

// one plays one round.
func one(d rdma.Device, o *synopt.Option, eid clc.EID, to string, rnd *rand.Rand, a attack, r *round) error {
	var p *peer
	for others := []*peer(nil); p == nil || a.victim && p.victim == nil; others = append(others, p) {
		if len(others) == serverDevices+1 {
			return errors.New("no two link groups are on one device of the server")
		}
		p = &peer{d: d, rnd: rnd}
		defer p.close() //nolint:gocritic // there are few
		if err := p.join(o, eid, to); err != nil {
			return err
		}
		r.Groups++
		if i := slices.IndexFunc(others, func(v *peer) bool { return v.accept.GID == p.accept.GID }); i >= 0 {
			p.victim = others[i]
		}
	}
	a.play(p)
	p.quiesce(afterAttack)
	r.Sent, r.Done, r.Refused = p.sent, p.done, p.refused
	return nil
}

// serverDevices is how many devices the server has: of one peer more, two are on the
// same.
const serverDevices = 2

// afterAttack is how long the peer may answer what was sent.
const afterAttack = 100 * time.Millisecond

// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Options says what Random may do.
type Options struct {
	Steps     int
	Conns     int  // at most at once
	KillLinks bool // break queue pairs
	Abort     bool // reset connections
}

// Random lets applications do what they like for a number of steps, and then
// ends everything. The world's seed decides.
func (w *World) Random(o Options) error {
	rng := rand.New(rand.NewPCG(w.cfg.Seed, 1))
	opened := 0
	var names []string
	for range o.Steps {
		if len(names) < o.Conns && rng.IntN(len(names)*4+2) == 0 {
			opened++
			name := fmt.Sprintf("c%d", opened)
			names = append(names, name)
			w.Connect(rng.IntN(2), name)
		}
		if len(names) > 0 {
			i := rng.IntN(len(names))
			if w.randomOp(rng, o, names[i]) {
				names = append(names[:i], names[i+1:]...)
			}
		}
		if o.KillLinks && rng.IntN(400) == 0 {
			w.KillLink(rng.IntN(2), rng.IntN(3)-1)
		}
		if rng.IntN(3) == 0 {
			w.Run(time.Duration(rng.IntN(200)) * time.Microsecond)
		}
		if rng.IntN(300) == 0 {
			w.Run(time.Duration(rng.IntN(20)) * time.Second)
		}
		if len(w.errs) > 0 {
			return w.Check()
		}
	}
	if err := w.Finish(); err != nil {
		return err
	}
	for _, name := range w.Names() {
		if c := w.conns[name]; c.failed != nil && !o.KillLinks {
			return fmt.Errorf("rendezvous of %s: %w", name, c.failed)
		}
	}
	return nil
}

// randomOp does something to one connection; true when it is over for its
// applications.
func (w *World) randomOp(rng *rand.Rand, o Options, name string) bool {
	side := rng.IntN(2)
	switch k := rng.IntN(100); {
	case k < 45:
		w.Write(name, side, rng.IntN(40_000))
	case k < 93:
		w.Read(name, side, rng.IntN(40_000))
	case k < 94:
		w.Shutdown(name, side)
	case k < 95:
		w.Close(name, side)
	case k < 96 && o.Abort:
		w.Abort(name, side)
	case k < 97:
		w.Close(name, 0)
		w.Close(name, 1)
		return true
	}
	return false
}

// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"runtime/debug"
	runtimemetrics "runtime/metrics"
	"time"
)

const (
	// spareEvery is the pause before memory is given back again at least, and sparePart of the time is
	// taken by it at most: a collection of garbage looks at all that the agent has.
	spareEvery = time.Second
	sparePart  = 20
	// spareLeast is what is worth it, and spareShare that part of what is in use: to give the rest back
	// would take more time than the memory is worth.
	spareLeast = 1 << 20
	spareShare = 4
)

// spare gives memory back to the system that the agent has and does not need. Go collects garbage when
// there is as much as is in use, and keeps what that frees. So after many connections were set up, an
// agent would have twice the memory that they need while they idle, until the next ones come. When
// sessions have come to rest there is nothing better to do:
//
//	set up      running      at rest: calm
//	  |  garbage  |  stacks    | collected, given back
//
// The fields belong to the goroutine of run, but for wave.
type spare struct {
	wave chan struct{} // has a token when sessions have come to rest
	next time.Time     // not before
	look func() (live, more uint64)
	free func()
}

func newSpare() *spare {
	return &spare{wave: make(chan struct{}, 1), look: lookMemory, free: debug.FreeOSMemory}
}

// calm notes that sessions have come to rest. It does not wait.
func (s *spare) calm() {
	select {
	case s.wave <- struct{}{}:
	default:
	}
}

// run is the goroutine.
func (s *spare) run(ctx context.Context) {
	for {
		select {
		case <-s.wave:
		case <-ctx.Done():
			return
		}
		if !sleep(ctx, time.Until(s.next)) {
			return
		}
		if live, more := s.look(); isSpare(live, more) {
			start := time.Now()
			s.free()
			end := time.Now()
			s.next = end.Add(max(spareEvery, sparePart*end.Sub(start)))
		}
	}
}

// isSpare reports whether it is worth while to give memory back: live bytes are in use, and there are
// more of garbage and free.
func isSpare(live, more uint64) bool { return more >= spareLeast && more >= live/spareShare }

// lookMemory returns how many bytes of the heap were in use when garbage was last collected, and how
// many more the process has.
func lookMemory() (live, more uint64) {
	s := []runtimemetrics.Sample{
		{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
	}
	runtimemetrics.Read(s)
	live = s[0].Value.Uint64()
	return live, s[1].Value.Uint64() - min(live, s[1].Value.Uint64()) + s[2].Value.Uint64()
}

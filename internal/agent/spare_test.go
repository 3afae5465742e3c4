// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// Memory is given back when sessions have come to rest, not more often than every spareEvery, only
// where there is some, and not for much of the time.
func TestSpare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const live = 100 << 20
		start := time.Now()
		var freed []time.Duration
		var more, takes atomic.Int64
		s := newSpare()
		s.look = func() (uint64, uint64) { return live, uint64(more.Load()) }
		times := make(chan time.Duration, 1) // of the next look of want
		s.free = func() {
			more.Store(0)
			times <- time.Since(start)
			<-time.After(time.Duration(takes.Load()))
		}
		stop := runBeside(t.Context(), s.run)
		want := func(what string, after ...time.Duration) {
			t.Helper()
			synctest.Wait()
			if len(times) > 0 {
				freed = append(freed, <-times)
			}
			if !slices.Equal(freed, after) {
				t.Errorf("%s: memory was given back after %v, want after %v", what, freed, after)
			}
		}
		more.Store(50 << 20)
		want("nothing has come to rest")
		s.calm()
		want("a wave", 0)
		<-time.After(spareEvery / 2)
		more.Store(50 << 20)
		s.calm()
		s.calm()
		want("another one, soon", 0)
		<-time.After(spareEvery)
		want("and a while later", 0, spareEvery)
		<-time.After(time.Hour)
		takes.Store(int64(time.Minute))
		more.Store(50 << 20)
		s.calm()
		<-time.After(time.Minute + sparePart*time.Minute - time.Second)
		more.Store(50 << 20)
		at := time.Since(start)
		s.calm()
		want("soon after it took long", 0, spareEvery, time.Hour+3*spareEvery/2)
		<-time.After(time.Second)
		want("and a while later", 0, spareEvery, time.Hour+3*spareEvery/2, at+time.Second)
		<-time.After(sparePart * time.Hour)
		more.Store(spareLeast) // too little beside 100 MiB
		s.calm()
		want("a wave that left little", freed...)
		stop()
	})
}

func TestIsSpare(t *testing.T) {
	for name, tt := range map[string]struct {
		live, more uint64
		want       bool
	}{
		"as much again":               {40 << 20, 40 << 20, true},
		"a quarter":                   {40 << 20, 10 << 20, true},
		"less than a quarter":         {40 << 20, 10<<20 - 1, false},
		"of a small heap, all of it":  {100 << 10, 900 << 10, false},
		"of a small heap, a megabyte": {100 << 10, 1 << 20, true},
	} {
		if got := isSpare(tt.live, tt.more); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// Garbage and free memory are what there is more than is in use.
func TestLookMemory(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))    // what is garbage stays until it was looked at
	const size = 32 << 20                               // far more than what runs beside leaves meanwhile
	runtime.KeepAlive(make([]byte, size))               // on the heap, and nobody's then
	if live, more := lookMemory(); more < size-64<<10 { // what was in use may be garbage, too
		t.Errorf("with %d bytes of garbage: %d in use, %d more", size, live, more)
	}
	newSpare().free()
	if live, more := lookMemory(); live == 0 || more > size/2 {
		t.Errorf("after all was given back: %d in use, %d more", live, more)
	}
}

// What runs beside goes on when the context ends, until it is stopped.
func TestRunBeside(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := false
	stop := runBeside(ctx, func(ctx context.Context) {
		<-ctx.Done()
		ended = true
	})
	cancel()
	stop()
	if !ended {
		t.Error("stop has not waited")
	}
}

// SPDX-License-Identifier: Apache-2.0

package smcrtest_test

import (
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/smcrtest"
)

var (
	simTime = flag.Duration("sim.time", 3*time.Second, "how long to simulate with random seeds")
	simSeed = flag.Uint64("sim.seed", 0, "simulate this seed only, with a trace")
)

// configure makes a world of a seed.
func configure(seed uint64) (smcrtest.Config, smcrtest.Options) {
	rng := rand.New(rand.NewPCG(seed, 2))
	cfg := smcrtest.Config{
		Seed: seed, Delays: rng.IntN(2) == 0,
		RMBESizes:   []uint32{16 << 10, 32 << 10, 64 << 10}[:1+rng.IntN(3)],
		SendBuffers: []uint32{4 << 10, 16 << 10, 64 << 10, 128 << 10},
	}
	switch rng.IntN(6) {
	case 0:
		cfg.RFC = true
	case 1, 2:
		cfg.Linux[rng.IntN(2)] = true
		cfg.LinuxTwoDevices = rng.IntN(2) == 0
	}
	return cfg, smcrtest.Options{
		Steps: 200 + rng.IntN(3000), Conns: 1 + rng.IntN(12), KillLinks: rng.IntN(3) == 0, Abort: rng.IntN(2) == 0,
	}
}

func TestSimulation(t *testing.T) {
	if *simSeed != 0 {
		cfg, o := configure(*simSeed)
		t.Logf("%+v %+v", cfg, o)
		w := smcrtest.New(cfg)
		w.Trace(t.Logf)
		if err := w.Random(o); err != nil {
			t.Fatal(err)
		}
		return
	}
	n := 0
	for end := time.Now().Add(*simTime); time.Now().Before(end); n++ {
		seed := rand.Uint64() | 1
		cfg, o := configure(seed)
		w := smcrtest.New(cfg)
		if err := w.Random(o); err != nil {
			t.Fatalf("-sim.seed %d: %v", seed, err)
		}
	}
	t.Logf("%d worlds", n)
}

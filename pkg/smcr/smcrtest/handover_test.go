// SPDX-License-Identifier: Apache-2.0

package smcrtest_test

import (
	"fmt"
	"hash/fnv"

	"github.com/smcr-io/kube-smcr/pkg/smcr/smcrtest"
)

// outcome is what a schedule leads to: each message and event on the way, and the end.
type outcome struct {
	trace     uint64 // a hash
	err       string
	handovers int
}

// outcomeOf plays a schedule; handover is as in smcrtest.Config.
func outcomeOf(s smcrtest.Schedule, handover int) (o outcome) {
	defer func() {
		if p := recover(); p != nil {
			o.err = fmt.Sprint("panic: ", p)
		}
	}()
	s.Config.Handover = handover
	trace := fnv.New64a()
	w := smcrtest.New(s.Config)
	w.Trace(func(format string, args ...any) { fmt.Fprintf(trace, format, args...) })
	defer func() { o.trace, o.handovers = trace.Sum64(), w.Handovers() }()
	for _, op := range s.Ops {
		w.Do(op)
		if err := w.Check(); err != nil {
			o.err = err.Error()
			return o
		}
	}
	if err := w.Finish(); err != nil {
		o.err = err.Error()
	}
	return o
}

// tryHandedOver plays a schedule twice. It must pass, and be the same, message by message, when
// each group of this project is replaced after each step by what is restored from its snapshot.
// It returns the number of handovers.
func tryHandedOver(s smcrtest.Schedule) (int, error) {
	a := outcomeOf(s, 0)
	if a.err != "" {
		return 0, fmt.Errorf("%s", a.err)
	}
	switch b := outcomeOf(s, 1); {
	case b.err != "":
		return b.handovers, fmt.Errorf("with %d handovers: %s", b.handovers, b.err)
	case a.trace != b.trace:
		return b.handovers, fmt.Errorf("with %d handovers messages or events differ", b.handovers)
	default:
		return b.handovers, nil
	}
}

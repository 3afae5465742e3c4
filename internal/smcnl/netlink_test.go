// SPDX-License-Identifier: Apache-2.0

package smcnl

import (
	"errors"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// TestDumpFew: a list that is read with a bound is what it is without. The list is of the kernel's generic netlink families, which each kernel
// has; that it is bounded, and how, is the business of package linux.
func TestDumpFew(t *testing.T) {
	const family = "nlctrl"
	all, err := dump(family, unix.CTRL_CMD_GETFAMILY)
	if err != nil {
		t.Fatal(err)
	}
	few, err := dumpFew(family, unix.CTRL_CMD_GETFAMILY)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) == 0 || !slices.EqualFunc(all, few, slices.Equal) {
		t.Errorf("%x\nwithout a bound: %x", few, all)
	}
	if _, err := dumpFew("KUBESMCR", cmdListPNets); !errors.Is(err, ErrNoSMC) {
		t.Errorf("a family that the kernel has not: %v, want ErrNoSMC", err)
	}
}

// TestSocketsOf: of a namespace with too many sockets those that were looked through are known, and that there are more.
func TestSocketsOf(t *testing.T) {
	msgs := answers(t, "sockets")
	for name, tc := range map[string]struct {
		msgs [][]byte
		why  error
		want int
		err  error
	}{
		"all":           {msgs, nil, len(msgs), nil},
		"too many":      {msgs, linux.ErrTooMuch, len(msgs), linux.ErrTooMuch},
		"not asked":     {nil, unix.ENOENT, 0, unix.ENOENT},
		"not an answer": {[][]byte{msgs[0], {1}}, linux.ErrTooMuch, 0, errShort},
	} {
		got, err := socketsOf(tc.msgs, tc.why)
		if len(got) != tc.want || !errors.Is(err, tc.err) {
			t.Errorf("%s: %d sockets, want %d, error %v", name, len(got), tc.want, err)
		}
	}
}

// TestIsWanted: only sockets that are wanted count, and answers that are none, so that the caller hears of them.
func TestIsWanted(t *testing.T) {
	msgs := append(answers(t, "sockets"), []byte{1})
	listens := isWanted(func(s *Socket) bool { return s.State == StateListen })
	n := 0
	for _, m := range msgs {
		if listens(m) {
			n++
		}
	}
	all, err := socketsOf(msgs[:len(msgs)-1], nil)
	if err != nil {
		t.Fatal(err)
	}
	want := 1
	for _, s := range all {
		if s.State == StateListen {
			want++
		}
	}
	if n != want || want == 1 || want == len(msgs) {
		t.Errorf("%d of %d answers are wanted, want %d", n, len(msgs), want)
	}
	if isWanted(nil) != nil {
		t.Error("asks for each socket, though all are wanted")
	}
}

// SPDX-License-Identifier: Apache-2.0

package rdmatools

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

const (
	// pingpongLen is LID, QPN, PSN and GID with colons between them and a zero.
	pingpongLen = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1
	// keysLen is the same of perftest; its GID has a colon behind each byte.
	keysLen = 4 + 1 + 4 + 1 + 6 + 1 + 6 + 1 + 8 + 1 + 16 + 1 + 16*3 + 8 + 1 + 1

	// version is how perftest 4.5+0.20 names itself; another version is no error
	// for it as long as the exchange is the same.
	version = "6.06"
	// cycleBuffer is the memory that perftest's small messages walk through.
	cycleBuffer = 4096
	cacheLine   = 64
)

// done ends both exchanges.
var done = []byte("done\x00")

var errText = errors.New("exchange: not the text of a queue pair")

// keys is what a program tells about its queue pair.
type keys struct {
	reads int // READs that it answers at a time (perftest)
	qpn   rdma.QPN
	psn   rdma.PSN
	rkey  rdma.RKey // perftest
	addr  uint64    // perftest
	gid   rdma.GID
}

// pingpong is the text of ibv_rc_pingpong.
func (k *keys) pingpong() []byte {
	return fmt.Appendf(nil, "%04x:%06x:%06x:%x\x00", 0, uint32(k.qpn), uint32(k.psn), k.gid[:])
}

// perftest is the text of perftest.
func (k *keys) perftest() []byte {
	b := fmt.Appendf(nil, "%04x:%04x:%06x:%06x:%08x:%016x:", 0, k.reads, uint32(k.qpn), uint32(k.psn), uint32(k.rkey), k.addr)
	for _, c := range k.gid {
		b = fmt.Appendf(b, "%02x:", c)
	}
	return fmt.Appendf(b, "%08x:\x00", 0)
}

// parsePingpong reads the text of ibv_rc_pingpong.
func parsePingpong(b []byte) (keys, error) {
	var k keys
	f, err := fields(b, pingpongLen, []int{4, 6, 6, 32})
	if err != nil {
		return k, err
	}
	k.qpn, k.psn = rdma.QPN(number(f[1])), rdma.PSN(number(f[2]))
	_, _ = hex.Decode(k.gid[:], []byte(f[3])) // fields has looked at each digit
	return k, nil
}

// parsePerftest reads the text of perftest.
func parsePerftest(b []byte) (keys, error) {
	var k keys
	widths := append([]int{4, 4, 6, 6, 8, 16}, bytesOf(16)...)
	widths = append(widths, 8, 0)
	f, err := fields(b, keysLen, widths)
	if err != nil {
		return k, err
	}
	k.reads = int(number(f[1]))
	k.qpn, k.psn = rdma.QPN(number(f[2])), rdma.PSN(number(f[3]))
	k.rkey, k.addr = rdma.RKey(number(f[4])), number(f[5])
	for i := range k.gid {
		k.gid[i] = byte(number(f[6+i]))
	}
	return k, nil
}

func bytesOf(n int) []int {
	w := make([]int, n)
	for i := range w {
		w[i] = 2
	}
	return w
}

// fields cuts a text of hexadecimal numbers of the given widths.
func fields(b []byte, length int, widths []int) ([]string, error) {
	if len(b) != length || b[length-1] != 0 {
		return nil, fmt.Errorf("%w: %d bytes %q, want %d", errText, len(b), b, length)
	}
	f := strings.Split(string(b[:length-1]), ":")
	if len(f) != len(widths) {
		return nil, fmt.Errorf("%w: %d fields in %q, want %d", errText, len(f), b, len(widths))
	}
	for i, s := range f {
		if len(s) != widths[i] || strings.Trim(s, "0123456789abcdefABCDEF") != "" {
			return nil, fmt.Errorf("%w: field %q in %q", errText, s, b)
		}
	}
	return f, nil
}

// number reads a field that fields has checked: at most 16 digits.
func number(s string) uint64 {
	n, _ := strconv.ParseUint(s, 16, 64)
	return n
}

// turns is the connection of one side.
type turns struct {
	io.ReadWriter
	client bool
}

// take gives the other side out and has then look at as many bytes from it. The
// client writes first; the server first reads and looks, and then writes.
func (t turns) take(what string, out []byte, then func(in []byte) error) error {
	if t.client {
		if err := t.put(what, out); err != nil {
			return err
		}
	}
	in := make([]byte, len(out))
	if _, err := io.ReadFull(t, in); err != nil {
		return fmt.Errorf("exchange: read %s: %w", what, err)
	}
	if then != nil {
		if err := then(in); err != nil {
			return err
		}
	}
	if t.client {
		return nil
	}
	return t.put(what, out)
}

func (t turns) put(what string, out []byte) error {
	if _, err := t.Write(out); err != nil {
		return fmt.Errorf("exchange: write %s: %w", what, err)
	}
	return nil
}

// awaitDone reads the end mark.
func (t turns) awaitDone() error {
	in := make([]byte, len(done))
	if _, err := io.ReadFull(t, in); err != nil {
		return fmt.Errorf("exchange: read the end mark: %w", err)
	}
	if !bytes.Equal(in, done) {
		return fmt.Errorf("exchange: end mark %q, want %q", in, done)
	}
	return nil
}

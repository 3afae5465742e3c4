// SPDX-License-Identifier: Apache-2.0

package widecrc

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

// A polynomial is a table under test with that of the library that it is compared with.
type polynomial struct {
	name  string
	table *Table
	other *crc32.Table
}

// polynomials are the functions under test, for each width that the processor can; those in use come first.
var polynomials = makePolynomials()

func makePolynomials() []polynomial {
	all := []polynomial{
		{"IEEE", IEEE, crc32.IEEETable},
		{"Castagnoli", Castagnoli, crc32.MakeTable(crc32.Castagnoli)},
	}
	for i := 1; i < len(widths()); i++ {
		name := fmt.Sprintf(" by %d bytes", widths()[i])
		all = append(all, polynomial{"IEEE" + name, makeTable(crc32.IEEE, widths()[i:]), all[0].other},
			polynomial{"Castagnoli" + name, makeTable(crc32.Castagnoli, widths()[i:]), all[1].other})
	}
	return all
}

func TestTable(t *testing.T) {
	if len(widths()) == 0 {
		t.Log("this processor does not fold: the test compares hash/crc32 with itself")
	}
	r := rand.New(rand.NewPCG(1, 2))
	buf := make([]byte, 12000)
	for i := range buf {
		buf[i] = byte(r.Uint32())
	}
	for _, p := range polynomials {
		t.Run(p.name, func(t *testing.T) {
			for n := range len(buf) - 64 {
				b, crc := buf[n%61:][:n], r.Uint32()
				want := crc32.Update(crc, p.other, b)
				if got := p.table.Update(crc, b); got != want {
					t.Fatalf("%d bytes: %#x, want %#x", n, got, want)
				}
				guarded := bytes.Repeat([]byte{0xee}, 70+n)
				dst := guarded[n%31+1:][:n]
				if got := p.table.Copy(crc, dst, b); got != want || !bytes.Equal(dst, b) {
					t.Fatalf("copy of %d bytes: %#x, want %#x, or other bytes", n, got, want)
				}
				clear(dst)
				if bytes.Count(guarded, []byte{0xee}) != 70 {
					t.Fatalf("copy of %d bytes wrote beside them", n)
				}
			}
		})
	}
}

// Some of the factors for CRC-32 are in the paper that the package names.
func TestFolds(t *testing.T) {
	want := folds{
		byW: [2]uint64{0x154442bd4, 0x1c6e41596}, by16: [2]uint64{0x1751997d0, 0x0ccaa009e}, by4: [2]uint64{0x163cd6124},
		barrett: [2]uint64{0x1db710641, 0x1f7011641},
	}
	got := newFolds(crc32.IEEE, 64)
	got.by4W, got.by3W, got.by2W, got.lanes = want.by4W, want.by3W, want.by2W, want.lanes // the others
	got.byStreams, got.byStream2, got.byStream = want.byStreams, want.byStream2, want.byStream
	if got != want {
		t.Errorf("%#x, want %#x", got, want)
	}
}

func TestTable_allocatesNothing(t *testing.T) {
	b, dst := make([]byte, 4096), make([]byte, 4096)
	if n := testing.AllocsPerRun(10, func() { Castagnoli.Copy(IEEE.Update(0, b), dst, b) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestTable_copyOfWhatChanges: the CRC is that of the copy, whatever becomes of the original meanwhile. Here the copy is over
// the original's end.
func TestTable_copyOfWhatChanges(t *testing.T) {
	for n := 2; n < 256; n++ {
		b := make([]byte, n+1)
		for i := range b {
			b[i] = byte(i * 7)
		}
		dst := b[1:]
		if got, want := Castagnoli.Copy(0, dst, b[:n]), Castagnoli.Update(0, dst); got != want {
			t.Errorf("%d bytes: %#x, the copy has %#x", n, got, want)
		}
	}
}

func FuzzUpdate(f *testing.F) {
	f.Add(uint32(0), []byte("a message"))
	f.Add(^uint32(0), make([]byte, 600))
	f.Add(uint32(7), bytes.Repeat([]byte("shared"), 1000))
	f.Fuzz(func(t *testing.T, crc uint32, b []byte) {
		for _, p := range polynomials {
			want := crc32.Update(crc, p.other, b)
			if got := p.table.Update(crc, b); got != want {
				t.Errorf("%s, %d bytes: %#x, want %#x", p.name, len(b), got, want)
			}
			dst := make([]byte, len(b))
			if got := p.table.Copy(crc, dst, b); got != want || !bytes.Equal(dst, b) {
				t.Errorf("%s, copy of %d bytes: %#x, want %#x, or other bytes", p.name, len(b), got, want)
			}
		}
	})
}

func BenchmarkUpdate(b *testing.B) {
	for _, p := range polynomials {
		for _, n := range []int{64, 128, 256, 512, 1024, 1448, 4096, 64 << 10, 1 << 20} {
			buf := make([]byte, n)
			b.Run(fmt.Sprintf("%s/%d", p.name, n), func(b *testing.B) {
				b.SetBytes(int64(n))
				for b.Loop() {
					p.table.Update(0, buf)
				}
			})
			b.Run(fmt.Sprintf("%s/%d/library", p.name, n), func(b *testing.B) {
				b.SetBytes(int64(n))
				for b.Loop() {
					crc32.Update(0, p.other, buf)
				}
			})
		}
	}
}

// BenchmarkCopy copies 1 MiB from one place of 256 KiB, as software iWARP does from its buffer.
func BenchmarkCopy(b *testing.B) {
	from, to := make([]byte, 256<<10), make([]byte, 1<<20)
	for _, how := range []struct {
		name string
		move func(dst, p []byte)
	}{
		{"at once", func(dst, p []byte) { Castagnoli.Copy(0, dst, p) }},
		{"one after the other", func(dst, p []byte) { Castagnoli.Update(0, p); copy(dst, p) }},
	} {
		b.Run(how.name, func(b *testing.B) {
			b.SetBytes(int64(len(to)))
			for b.Loop() {
				for off := 0; off < len(to); off += 64 << 10 {
					how.move(to[off:][:64<<10], from[off%len(from):][:64<<10])
				}
			}
		})
	}
}

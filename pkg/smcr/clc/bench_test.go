// SPDX-License-Identifier: Apache-2.0

package clc

import "testing"

// benched are one message of each form, the longest included.
func benched(tb testing.TB) []sample {
	return []sample{
		{"proposal", load(tb, "captured/proposal-40")},
		{"proposal-v2", load(tb, "captured/proposal-01")},
		{"proposal-full", fullProposal().Append(nil)},
		{"accept", load(tb, "captured/accept-40")},
		{"accept-v2", load(tb, "captured/accept-01")},
		{"confirm", load(tb, "captured/confirm-40")},
		{"confirm-v2", load(tb, "captured/confirm-20")},
		{"decline", load(tb, "captured/decline-11")},
		{"decline-v2", load(tb, "captured/decline-12")},
	}
}

func BenchmarkParse(b *testing.B) {
	for _, s := range benched(b) {
		b.Run(s.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := recode(nil, s.raw); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkParseAppend(b *testing.B) {
	for _, s := range benched(b) {
		buf := make([]byte, 0, MaxLen)
		b.Run(s.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := recode(buf, s.raw); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// recode decodes a message and, unless dst is nil, encodes it again. It uses
// no interface, which would be an allocation of the benchmark and not of the
// codec.
func recode(dst, raw []byte) ([]byte, error) {
	h, err := ParseHeader([HeaderLen]byte(raw))
	if err != nil {
		return nil, err
	}
	switch h.Type {
	case TypeProposal:
		m, err := ParseProposal(raw)
		if err != nil || dst == nil {
			return nil, err
		}
		return m.Append(dst), nil
	case TypeAccept:
		m, err := ParseAccept(raw)
		if err != nil || dst == nil {
			return nil, err
		}
		return m.Append(dst), nil
	case TypeConfirm:
		m, err := ParseConfirm(raw)
		if err != nil || dst == nil {
			return nil, err
		}
		return m.Append(dst), nil
	case TypeDecline:
		m, err := ParseDecline(raw)
		if err != nil || dst == nil {
			return nil, err
		}
		return m.Append(dst), nil
	}
	return nil, parseErr(4, "unknown message type %d", raw[4])
}

// A message of any form is decoded and encoded without allocation.
func TestCodecAllocatesNothing(t *testing.T) {
	for _, s := range benched(t) {
		buf := make([]byte, 0, MaxLen)
		var err error
		if n := testing.AllocsPerRun(100, func() { _, err = recode(buf, s.raw) }); n != 0 || err != nil {
			t.Errorf("%s: %v allocations, %v", s.name, n, err)
		}
	}
}

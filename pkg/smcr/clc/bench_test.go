// SPDX-License-Identifier: Apache-2.0

package clc

import "testing"

// Lists of version 2 (EIDs, GIDs) are the one thing whose parsing allocates.
// CLC messages are sent at the opening of a connection only.
func BenchmarkParse(b *testing.B) {
	for _, tt := range []struct{ name, file string }{
		{"proposal", "proposal-40"},
		{"proposal-v2", "proposal-01"},
		{"accept", "accept-40"},
		{"accept-v2", "accept-01"},
		{"confirm", "confirm-40"},
		{"confirm-v2", "confirm-01"},
		{"decline", "decline-11"},
	} {
		raw := load(b, "captured/"+tt.file)
		b.Run(tt.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := parseOne(raw); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// parseOne decodes without an interface, which would be an allocation of the
// benchmark and not of the codec.
func parseOne(raw []byte) error {
	h, err := ParseHeader([HeaderLen]byte(raw))
	if err != nil {
		return err
	}
	switch h.Type {
	case TypeProposal:
		_, err = ParseProposal(raw)
	case TypeAccept:
		_, err = ParseAccept(raw)
	case TypeConfirm:
		_, err = ParseConfirm(raw)
	case TypeDecline:
		_, err = ParseDecline(raw)
	}
	return err
}

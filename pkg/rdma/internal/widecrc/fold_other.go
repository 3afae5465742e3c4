// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package widecrc

import "github.com/smcr-io/kube-smcr/internal/invariant"

// widths: no message is folded.
func widths() []int { return nil }

func never() uint32 {
	invariant.Must(false, "this processor does not fold")
	return 0
}

func fold64(*byte, int, uint32, *folds, int) uint32 { return never() }

func fold32(*byte, int, uint32, *folds, int) uint32 { return never() }

func foldCopy64(*byte, int, uint32, *folds, int, *byte) uint32 { return never() }

func foldCopy32(*byte, int, uint32, *folds, int, *byte) uint32 { return never() }

// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package widecrc

import (
	"math"

	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// leastFolded: no message is folded.
const leastFolded = math.MaxInt

func fold(*byte, int, uint32, *folds, int) uint32 {
	invariant.Must(false, "this processor does not fold")
	return 0
}

func foldCopy(*byte, int, uint32, *folds, int, *byte) uint32 {
	invariant.Must(false, "this processor does not fold")
	return 0
}

// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// caseTimeout bounds one run of two programs in guests that may share a core.
const caseTimeout = 3 * time.Minute

func TestRoCEv2(t *testing.T) {
	l := lab.ForTest(t, lab.Config{Name: "rocev2"})
	if _, err := l.Guest(1).Run(t.Context(), "rdma", "link", "show", "rxe0/1"); err != nil { // guests that stay have it
		if err := l.Guest(1).AddRXE(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("tools", func(t *testing.T) { testTools(t, l) })
	t.Run("suite", func(t *testing.T) { testSuite(t, l) })
}

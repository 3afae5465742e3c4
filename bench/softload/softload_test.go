// SPDX-License-Identifier: Apache-2.0

package softload

import "testing"

func TestStackAddr(t *testing.T) {
	for i, want := range map[int]string{0: "192.0.2.2:7002", 99: "192.0.2.2:7101"} {
		if got, err := stackAddr("192.0.2.2:7002", i); got != want || err != nil {
			t.Errorf("stack %d is at %s, want %s; %v", i, got, want, err)
		}
	}
	if _, err := stackAddr("nowhere", 0); err == nil {
		t.Error("no error of a wrong address")
	}
}

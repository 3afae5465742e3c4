// SPDX-License-Identifier: Apache-2.0

package report

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestStamp(t *testing.T) {
	was := []metav1.Condition{{Type: "A", Status: "True", LastTransitionTime: metav1.Time{Time: began()}}, {Type: "B", Status: "True", LastTransitionTime: metav1.Time{Time: began()}}}
	is := []metav1.Condition{{Type: "A", Status: "True", Message: "new"}, {Type: "B", Status: "False"}, {Type: "C", Status: "True"}}
	now := began().Add(90*time.Second + 7)
	stamp(is, was, now)
	want := []time.Time{began(), began().Add(90 * time.Second), began().Add(90 * time.Second)}
	for i := range is {
		if !is[i].LastTransitionTime.Time.Equal(want[i]) {
			t.Errorf("%s since %v, want %v", is[i].Type, is[i].LastTransitionTime, want[i])
		}
	}
}

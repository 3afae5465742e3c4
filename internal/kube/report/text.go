// SPDX-License-Identifier: Apache-2.0

package report

import (
	"math"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// secondOfAPI is the resolution of times in objects: a time is cut to it, so that the
// object that is written equals the one that is read.
const secondOfAPI = time.Second

func condition(kind string, status metav1.ConditionStatus, reason, message string) metav1.Condition {
	return metav1.Condition{Type: kind, Status: status, Reason: reason, Message: clip(strings.ReplaceAll(message, "\n", "; "), maxMessage)}
}

// stamp gives each condition the time of its last change: now, or, if the condition had
// the same status before, the time that it had.
func stamp(conditions, before []metav1.Condition, now time.Time) {
	for i := range conditions {
		c := &conditions[i]
		c.LastTransitionTime = metav1.Time{Time: now.Truncate(secondOfAPI)}
		if was := meta.FindStatusCondition(before, c.Type); was != nil && was.Status == c.Status {
			c.LastTransitionTime = was.LastTransitionTime
		}
	}
}

// clip shortens s to n bytes.
func clip(s string, n int) string {
	if len(s) > n {
		s = strings.ToValidUTF8(s[:n-len("...")], "") + "..."
	}
	return s
}

// clamp makes an int32 of a count.
func clamp(n int) int32 {
	return int32(max(0, min(n, math.MaxInt32)))
}

// SPDX-License-Identifier: Apache-2.0

package deadline

import (
	"testing"
	"testing/synctest"
	"time"
)

// A deadline may be moved, also by a waiter's neighbour and also after it has passed: who
// began to wait before that hears of the one that was there then.
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d Deadline
		d.Init()
		over := func(c <-chan struct{}) bool {
			synctest.Wait()
			select {
			case <-c:
				return true
			default:
				return false
			}
		}
		check := func(what string, want bool) {
			t.Helper()
			if got := over(d.Wait()); got != want || d.Past() != want {
				t.Errorf("%s: over %v, past %v, want %v", what, got, d.Past(), want)
			}
		}
		check("never set", false)
		d.Set(time.Now().Add(time.Second))
		first := d.Wait()
		<-time.After(999 * time.Millisecond) // of the bubble's clock
		check("a millisecond early", false)
		d.Set(time.Now().Add(time.Second))
		<-time.After(999 * time.Millisecond)
		check("moved", false)
		<-time.After(time.Millisecond)
		check("reached", true)
		if !over(first) {
			t.Error("who waited since before it was moved does not hear of it")
		}
		d.Set(time.Time{})
		check("taken away", false)
		d.Set(time.Now().Add(-time.Second))
		check("in the past", true)
		d.Set(time.Now())
		check("in the past again", true)
		d.Set(time.Now().Add(time.Second))
		check("in the future again", false)
		d.Stop()
		<-time.After(2 * time.Second)
		check("stopped", false)
		d.Set(time.Now().Add(time.Second)) // by somebody who has not heard of the end
		d.Set(time.Time{})
		d.Stop()
		<-time.After(2 * time.Second)
		check("set when it was stopped", false)
	})
}

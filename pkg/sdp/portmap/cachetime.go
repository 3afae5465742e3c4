// SPDX-License-Identifier: Apache-2.0

package portmap

import "time"

// CacheTime says how long a client may use a PMAccept (§7.3.1.4, PmTime): up to 31.75 s in quarters of
// a second, from 128 s to 254 s in seconds.
type CacheTime uint8

// Those that are no time.
const (
	OneUse  CacheTime = 0   // for one connection, at once
	Forever CacheTime = 255 // as long as the client likes
)

const (
	quarter     = 250 * time.Millisecond
	maxQuarters = 127
	maxSeconds  = 254
)

// NewCacheTime returns the longest time that is no longer than d: between 31.75 s and 128 s there is
// none but the former.
func NewCacheTime(d time.Duration) CacheTime {
	switch {
	case d <= 0:
		return OneUse
	case d >= (maxQuarters+1)*time.Second:
		return CacheTime(min(d/time.Second, maxSeconds))
	}
	return CacheTime(min(d/quarter, maxQuarters))
}

// Duration returns the time, at most [MaxCacheTime]; 0 for [OneUse].
func (t CacheTime) Duration() time.Duration {
	switch {
	case t == Forever:
		return MaxCacheTime
	case t <= maxQuarters:
		return time.Duration(t) * quarter
	}
	return time.Duration(t) * time.Second
}

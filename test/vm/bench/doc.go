// SPDX-License-Identifier: Apache-2.0

// Package bench tests that the comparison in guests, bench/guests, still runs.
// What it measures is looked at by people.
package bench

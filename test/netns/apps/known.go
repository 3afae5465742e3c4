// SPDX-License-Identifier: Apache-2.0

package apps

// A difference is a test that fails in pods that are opted in and not over plain TCP,
// and why that is so.
type difference struct {
	suite, part, test string
	modes             []mode
	why               string
}

// known are the differences that are properties of a relay. README.md says the same to
// its readers.
var known = []difference{}

// explained returns why a test fails in a mode, and "" if nobody knows.
func explained(suite, part, test string, m mode) string {
	for _, d := range known {
		if d.suite != suite || d.part != part || d.test != test {
			continue
		}
		for _, in := range d.modes {
			if in == m {
				return d.why
			}
		}
	}
	return ""
}

// SPDX-License-Identifier: Apache-2.0

package sockets

import (
	"errors"
	"fmt"
	"strings"
)

// A Run is what came of all trials in one way.
type Run struct {
	// Title is what its column is called.
	Title string
	Rows  []Row
}

// Table writes what differs between the first run, on TCP, and the others as a table of Markdown, and
// then the names of what does not. All runs have the same trials.
func Table(runs ...Run) (string, error) {
	var b strings.Builder
	b.WriteString("| what a program does |")
	for _, r := range runs {
		fmt.Fprintf(&b, " %s |", r.Title)
	}
	b.WriteString(" matters for |\n|---|" + strings.Repeat("---|", len(runs)) + "---|\n")
	var same []string
	var errs []error
	for i, row := range runs[0].Rows {
		differs := false
		line := fmt.Sprintf("| %s |", row.Name)
		for _, r := range runs {
			if len(r.Rows) != len(runs[0].Rows) || r.Rows[i].Name != row.Name {
				return "", fmt.Errorf("%s has other trials than %s, at %q", r.Title, runs[0].Title, row.Name)
			}
			result := strings.ReplaceAll(r.Rows[i].Result, "|", "\\|")
			differs = differs || result != row.Result
			line += fmt.Sprintf(" %s |", result)
		}
		if !differs {
			same = append(same, row.Name)
			continue
		}
		why := matters(row.Name)
		if why == "" {
			errs = append(errs, fmt.Errorf("%q differs, and its trial does not say for which programs that matters: %s", row.Name, line))
		}
		fmt.Fprintf(&b, "%s %s |\n", line, why)
	}
	fmt.Fprintf(&b, "\nThe same everywhere, with what it was tried with: %s.\n", strings.Join(same, "; "))
	return b.String(), errors.Join(errs...)
}

// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strings"
)

// FieldError is one mistake in a configuration file.
type FieldError struct {
	File         string
	Line, Column int
	Field        string // the path of the field, such as policies[2].ports[0]
	Problem      string // what is wrong and what would be right
}

// Error is the mistake with its place as FILE:LINE:COLUMN, which editors can jump to.
func (e *FieldError) Error() string {
	return fmt.Sprintf("%s:%d:%d: %s: %s", e.File, e.Line, e.Column, e.Field, e.Problem)
}

// Errors are all mistakes of a file, in the order of the file.
type Errors []*FieldError

// Error has one line for each mistake.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, f := range e {
		lines[i] = f.Error()
	}
	return strings.Join(lines, "\n")
}

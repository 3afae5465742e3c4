// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"strings"

	"github.com/smcr-io/kube-smcr/internal/cli"
	"github.com/smcr-io/kube-smcr/internal/preflight"
)

func printPreflight(w io.Writer, r preflight.Report) error {
	rows := []string{cli.Row("CHECK", "RESULT", "DETAIL")}
	for _, c := range r.Checks {
		rows = append(rows, cli.Row(c.Name, c.Result, strings.ReplaceAll(c.Detail, "\n", "; ")))
		for _, s := range []string{c.Means, c.Advice} {
			if s != "" {
				rows = append(rows, "\t\t-> "+s)
			}
		}
	}
	return cli.Table(w, rows...)
}

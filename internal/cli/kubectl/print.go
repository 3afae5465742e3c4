// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"fmt"
	"io"
	"strings"

	"github.com/smcr-io/kube-smcr/internal/cli"
)

// PrintAnswer prints an answer for people.
func PrintAnswer(w io.Writer, a Answer) error {
	rows := []string{cli.Row("verdict", a.Verdict)}
	add := func(name, value string) {
		if value != "" {
			rows = append(rows, cli.Row(name, value))
		}
	}
	add("reason", string(a.Code))
	for i, s := range a.Advice {
		name := "what to do"
		if i > 0 {
			name = " "
		}
		add(name, s)
	}
	add("policy", a.Policy)
	if a.Required {
		add("mode", "Required: connections without SMC-R are reset")
	}
	add("destination", describe(a.Destination))
	for _, n := range a.Notes {
		add("note", n)
	}
	if err := cli.Table(w, rows...); err != nil {
		return err
	}
	if err := printSide(w, "from", "", a.Source); err != nil {
		return err
	}
	for _, p := range a.Peers {
		if err := printSide(w, "to", " ("+p.Asked.String()+")", p); err != nil {
			return err
		}
	}
	return nil
}

func describe(d Destination) string {
	var addrs []string
	for _, a := range d.Addresses {
		addrs = append(addrs, a.String())
	}
	text := strings.Join(addrs, ", ")
	if d.Name != "" {
		text += fmt.Sprintf(" (%s %s)", strings.ToLower(d.Kind), d.Name)
	}
	return text
}

func printSide(w io.Writer, word, address string, s Side) error {
	node := ""
	if s.Node != "" {
		node = " on node " + s.Node
	}
	if _, err := fmt.Fprintf(w, "\n%s pod %s%s%s\n", word, s.Pod, address, node); err != nil {
		return err
	}
	rows := []string{cli.Row("opted in", s.OptIn.String())}
	if s.Status != "" {
		rows = append(rows, cli.Row("status", s.Status))
	}
	if s.Error != "" {
		rows = append(rows, cli.Row("agent", s.Error))
	}
	if err := cli.Table(w, rows...); err != nil || s.Answer == nil {
		return err
	}
	return cli.PrintExplanation(w, *s.Answer)
}

// PrintNodes prints the answers of several agents, each by calling one. A single answer has
// no heading.
func PrintNodes[T any](w io.Writer, answers []NodeAnswer[T], one func(io.Writer, T) error) error {
	for i, a := range answers {
		if len(answers) > 1 {
			gap := ""
			if i > 0 {
				gap = "\n"
			}
			if _, err := fmt.Fprintf(w, "%snode %s\n", gap, a.Node); err != nil {
				return err
			}
		}
		if a.Error != "" {
			if _, err := fmt.Fprintln(w, cli.Line(a.Error)); err != nil {
				return err
			}
			continue
		}
		if err := one(w, *a.Answer); err != nil {
			return err
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package plot

import (
	_ "embed" // the picture's template
	"fmt"
	"io"
	"strings"
	"text/template"
)

//go:embed chart.svg.tmpl
var source string

// picture makes SVG of a view.
var picture = template.Must(template.New("chart").Funcs(template.FuncMap{"px": px}).Parse(source))

// px prints a coordinate.
func px(v float64) string { return fmt.Sprintf("%.1f", v) }

// view is what the template needs: everything has its coordinates.
type view struct {
	Title, Where, Note, X, Y string
	Width, Height            int
	Left, Right, Top, Bottom int
	Across                   []label // lines of values, with their labels
	Up                       []label // places
	Paths                    []path
}

// label is a text with its coordinate on one axis.
type label struct {
	At   float64
	Text string
}

// path is a line with all its dots.
type path struct {
	Name   string
	Number int // of its colour and form
	Legend float64
	Line   string // of coordinates
	Dots   []mark
}

// mark is a dot with its whisker.
type mark struct {
	X, Y, Min, Max float64
	Text           string
}

// draw writes the picture.
func (c *chart) draw(w io.Writer) error { return picture.Execute(w, c.view()) }

func (c *chart) view() view {
	places := c.places()
	x := axis{places[0], places[len(places)-1], left + edge, right - edge}
	y, ticks := decades(c.values(), bottom, top)
	v := view{
		Title: c.Title, Where: c.Where, Note: c.note, X: string(c.X), Y: c.Y + ", " + c.unit,
		Width: width, Height: height, Left: left, Right: right, Top: top, Bottom: bottom,
	}
	for _, t := range ticks {
		v.Across = append(v.Across, label{y.at(t.Value), t.Label})
	}
	for _, p := range places {
		v.Up = append(v.Up, label{x.at(p), c.place(p)})
	}
	legend := float64(left)
	for i, l := range c.lines {
		p := path{Name: l.path, Number: i % forms, Legend: legend}
		legend += legendRoom + legendLetter*float64(len(l.path))
		shift := beside * (float64(i) - float64(len(c.lines)-1)/2)
		var line strings.Builder
		for _, d := range l.dots {
			m := mark{X: x.at(d.at) + shift, Y: y.at(d.Median), Min: y.at(d.Min), Max: y.at(d.Max)}
			m.Text = fmt.Sprintf("%s, %s: %.3g %s (%.3g to %.3g)", l.path, c.place(d.at), d.Median, c.unit, d.Min, d.Max)
			fmt.Fprintf(&line, "%s,%s ", px(m.X), px(m.Y))
			p.Dots = append(p.Dots, m)
		}
		p.Line = strings.TrimSpace(line.String())
		v.Paths = append(v.Paths, p)
	}
	return v
}

// forms is how many colours and forms of dots the template has.
const forms = 5

// values are all that has a place on the Y axis.
func (c *chart) values() []float64 {
	var all []float64
	for _, l := range c.lines {
		for _, d := range l.dots {
			all = append(all, d.Min, d.Max)
		}
	}
	return all
}

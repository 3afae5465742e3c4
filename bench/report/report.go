// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// Report is the outcome of a run.
type Report struct {
	CPU      string `json:"cpu"`
	Cores    int    `json:"cores"`
	MaxProcs int    `json:"gomaxprocs"`
	Kernel   string `json:"kernel"`
	Go       string `json:"go"`
	// Congestion is TCP's congestion control; empty if nobody chose one.
	Congestion string  `json:"tcpCongestion,omitempty"`
	Note       string  `json:"note,omitempty"` // what else a reader should know
	Rounds     int     `json:"rounds"`
	Seconds    float64 `json:"secondsPerMeasurement"`
	Cases      []*Case `json:"cases"`
	Charts     []Chart `json:"charts,omitempty"`
	Micro      []Micro `json:"micro,omitempty"`
}

// Case is one measurement over several paths. Series have one value per round,
// and the same index is the same round.
type Case struct {
	Group  string   `json:"group"`
	Name   string   `json:"name"`
	Unit   string   `json:"unit"`
	Lower  bool     `json:"lowerIsBetter"`
	Series []Series `json:"series"`
	// Base is the path that ratios refer to.
	Base    string   `json:"base"`
	Targets []Target `json:"targets,omitempty"`
	Points  []Point  `json:"points,omitempty"`
}

// Chart is a picture of the cases that have a point in it.
type Chart struct {
	Name  string `json:"name"` // of its file, without the ending
	Title string `json:"title"`
	Where string `json:"where"` // between what it was measured
	X     Axis   `json:"x"`
	Y     string `json:"y"` // what is measured, without its unit
}

// Axis is what the points of a chart differ in.
type Axis string

// What cases are swept over.
const (
	WriteBytes   Axis = "size of write"
	MessageBytes Axis = "size of message"
	Connections  Axis = "connections"
)

// Bytes reports whether the axis has sizes.
func (a Axis) Bytes() bool { return a == WriteBytes || a == MessageBytes }

// Point is where a case stands in a chart.
type Point struct {
	Chart string  `json:"chart"` // its name
	At    float64 `json:"at"`    // on its X axis
}

// Series is what one path gave.
type Series struct {
	Path   string    `json:"path"`
	Values []float64 `json:"values"`
	// Seconds is how long each round took: much more than asked for is a stall.
	Seconds []float64 `json:"seconds"`
	Spread  Spread    `json:"spread"`
	Ratio   Spread    `json:"ratioToBase"`
	// Costs are the costs of the rounds, Cost is their medians.
	Costs []Cost `json:"-"`
	Cost  Cost   `json:"cost"`
}

// Target is what a path has to reach in the median of the rounds: at least Limit times
// the value of another path, or at most where lower is better. Without another path Limit
// is for the path's own value. What is judged of a Cost is the cost itself, and at most Limit.
type Target struct {
	Path    string   `json:"path"`
	Against string   `json:"against,omitempty"`
	Cost    CostName `json:"cost,omitempty"`
	Limit   float64  `json:"limit"`
	// Is has the ratios of the rounds, or the values or costs themselves.
	Is      Spread `json:"is"`
	Reached bool   `json:"reached"`
}

// Micro is a benchmark of one package.
type Micro struct {
	Package   string  `json:"package"`
	Name      string  `json:"name"`
	Nanos     float64 `json:"nsPerOp"`
	Bytes     float64 `json:"bytesPerOp"`
	Allocs    float64 `json:"allocsPerOp"`
	MBPerSec  float64 `json:"megabytesPerSecond,omitempty"`
	Judged    bool    `json:"judged"` // it is held to the target of no allocation
	NoAllocs  bool    `json:"noAllocations"`
	Iteration int     `json:"iterations"`
}

// Add notes the value of one path in the round under way.
func (c *Case) Add(path string, value, seconds float64, cost Cost) {
	i := slices.IndexFunc(c.Series, func(s Series) bool { return s.Path == path })
	if i < 0 {
		i = len(c.Series)
		c.Series = append(c.Series, Series{Path: path})
	}
	s := &c.Series[i]
	s.Values = append(s.Values, value)
	s.Seconds = append(s.Seconds, seconds)
	s.Costs = append(s.Costs, cost)
}

func (c *Case) values(path string) []float64 {
	for _, s := range c.Series {
		if s.Path == path {
			return s.Values
		}
	}
	return nil
}

// Judge computes spreads, ratios and targets from the values.
func (c *Case) Judge() {
	base := c.values(c.Base)
	for i := range c.Series {
		s := &c.Series[i]
		s.Spread = SpreadOf(s.Values)
		s.Cost = medianCost(s.Costs)
		s.Ratio = SpreadOf(ratios(s.Values, base))
	}
	for i := range c.Targets {
		c.judge(&c.Targets[i])
	}
}

// judge judges one target. What was never measured is not reached.
func (c *Case) judge(t *Target) {
	values := c.values(t.Path)
	switch {
	case t.Cost != "":
		values = c.costs(t.Path, t.Cost)
	case t.Against != "":
		values = ratios(values, c.values(t.Against))
	}
	t.Is = SpreadOf(values)
	if t.least(c.Lower) {
		t.Reached = len(values) > 0 && t.Is.Median >= t.Limit
	} else {
		t.Reached = len(values) > 0 && t.Is.Median <= t.Limit
	}
}

// costs are the costs of a path with that name, round by round.
func (c *Case) costs(path string, name CostName) []float64 {
	var all []float64
	for _, s := range c.Series {
		if s.Path != path {
			continue
		}
		for _, cost := range s.Costs {
			if v, counted := cost.of(name); counted {
				all = append(all, v)
			}
		}
	}
	return all
}

// least says that more is better.
func (t *Target) least(lower bool) bool { return !lower && t.Cost == "" }

// text is the verdict for the table.
func (c *Case) text(t *Target) string {
	verdict, want := "not reached", "at most"
	if t.Reached {
		verdict = "reached"
	}
	if t.least(c.Lower) {
		want = "at least"
	}
	what, is := c.Unit, t.Is.number()
	switch {
	case t.Cost != "":
		what = string(t.Cost)
	case t.Against != "":
		return fmt.Sprintf("%s: %s %.2f of %s, is %s", verdict, want, t.Limit, t.Against, t.Is.ratio())
	}
	return fmt.Sprintf("%s: %s, is %s", verdict, strings.Join(strings.Fields(want+" "+number(t.Limit)+" "+what), " "), is)
}

func (s Spread) ratio() string {
	if s.Median == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f (%.2f to %.2f)", s.Median, s.Min, s.Max)
}

// number is the spread of values that are no ratios.
func (s Spread) number() string {
	return fmt.Sprintf("%s (%s to %s)", number(s.Median), number(s.Min), number(s.Max))
}

// number prints three significant digits without an exponent.
func number(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// WriteJSON prints the report for programs.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// Read reads what WriteJSON wrote.
func Read(file string) (*Report, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	r := new(Report)
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return r, nil
}

// Software says on what the measured programs ran: the kernel's release, which the caller may have made shorter, Go and, if
// somebody chose one, TCP's congestion control.
func (r *Report) Software(kernel string) string {
	s := fmt.Sprintf("Linux %s, %s", kernel, r.Go)
	if r.Congestion != "" {
		s += ", TCP with " + r.Congestion
	}
	return s
}

// WriteTable prints the report for eyes.
func (r *Report) WriteTable(w io.Writer) error {
	fmt.Fprintf(w, "%s, %d cores, GOMAXPROCS %d, %s; %d rounds of %.1f s\n",
		r.CPU, r.Cores, r.MaxProcs, r.Software(r.Kernel), r.Rounds, r.Seconds)
	if r.Note != "" {
		fmt.Fprintln(w, r.Note)
	}
	group := ""
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range r.Cases {
		if c.Group != group {
			group = c.Group
			if err := tw.Flush(); err != nil {
				return err
			}
			fmt.Fprintf(w, "\n%s\n", group)
			fmt.Fprintln(tw, "measurement\tpath\tmedian\tunit\tratio to "+c.Base+"\tcost of the path\ttarget")
		}
		c.writeRows(tw)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	return r.writeRest(w)
}

func (c *Case) writeRows(w io.Writer) {
	name, unit := c.Name, c.Unit
	if c.Lower {
		unit += " (less is better)"
	}
	for _, s := range c.Series {
		ratio := s.Ratio.ratio()
		if s.Path == c.Base {
			ratio = ""
		}
		var targets []string
		for i := range c.Targets {
			if t := &c.Targets[i]; t.Path == s.Path {
				targets = append(targets, c.text(t))
			}
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", name, s.Path, number(s.Spread.Median), unit, ratio, s.Cost.text(), strings.Join(targets, "; "))
		name, unit = "", ""
	}
}

// writeRest prints the benchmarks of the packages and the notes.
func (r *Report) writeRest(w io.Writer) error {
	if len(r.Micro) > 0 {
		fmt.Fprintf(w, "\ncodecs and data path: go test -bench\n")
		tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(tw, "package\tbenchmark\tns/op\tMB/s\tB/op\tallocs/op\ttarget")
		for _, m := range r.Micro {
			speed, target := "", ""
			if m.MBPerSec > 0 {
				speed = number(m.MBPerSec)
			}
			switch {
			case m.Judged && m.NoAllocs:
				target = "reached: no allocation"
			case m.Judged:
				target = "not reached: no allocation"
			}
			fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", m.Package, m.Name, number(m.Nanos), speed, number(m.Bytes), number(m.Allocs), target)
		}
		if err := tw.Flush(); err != nil {
			return err
		}
	}
	reached, all := r.verdict()
	_, err := fmt.Fprintf(w, "\ntargets: %d of %d reached\n", reached, all)
	return err
}

// verdict counts the targets.
func (r *Report) verdict() (reached, all int) {
	count := func(good bool) {
		all++
		if good {
			reached++
		}
	}
	for _, c := range r.Cases {
		for _, t := range c.Targets {
			count(t.Reached)
		}
	}
	for _, m := range r.Micro {
		if m.Judged {
			count(m.NoAllocs)
		}
	}
	return reached, all
}

// New returns a report of this machine without any case.
func New(rounds int, duration time.Duration) (*Report, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return nil, fmt.Errorf("uname: %w", err)
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil, err
	}
	return &Report{
		CPU: cpuModel(string(info)), Cores: runtime.NumCPU(), MaxProcs: runtime.GOMAXPROCS(0),
		Kernel: unix.ByteSliceToString(u.Release[:]), Go: runtime.Version(),
		Rounds: rounds, Seconds: duration.Seconds(),
	}, nil
}

// cpuModel finds the model in /proc/cpuinfo.
func cpuModel(info string) string {
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

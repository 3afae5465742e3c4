// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"flag"
	"fmt"
	"time"
)

// Settings are the flags of every comparison.
type Settings struct {
	Rounds   int
	Duration time.Duration // of one measurement
	JSON     bool          // printed instead of the table
	JSONFile string
	Profile  string // the directory for CPU profiles; none if empty
	Only     string // what the names of measurements contain
	Plot     string // the directory for plots; none if empty
	From     string // the file of JSON to print and draw instead of measuring; none if empty
}

// Define defines the flags and returns the one for [Settings.Check]. Profiles are
// of these workers.
func (s *Settings) Define(f *flag.FlagSet, duration time.Duration, profiled string) (output *string) {
	f.IntVar(&s.Rounds, "rounds", 5, "rounds of each measurement")
	f.DurationVar(&s.Duration, "time", duration, "length of a measurement")
	f.StringVar(&s.JSONFile, "json-file", "", "write JSON to this file too")
	f.StringVar(&s.Profile, "profile", "", "write CPU profiles of "+profiled+" into this directory")
	f.StringVar(&s.Only, "only", "", "measure only what has this in its name, like \"round trip\"")
	f.StringVar(&s.Plot, "plot", "", "draw plots (SVG) of what was swept into this directory")
	f.StringVar(&s.From, "from", "", "measure nothing: print and draw the JSON of this file")
	return f.String("o", "table", "output: table or json")
}

// Check takes the output that -o names, and says whether the flags can be met; the number of arguments behind them must
// be 0. limits is what the error says of the limits of the program's own flags, ", -rnics from 1 to 8" for example, and met
// whether these are met.
func (s *Settings) Check(output string, arguments int, limits string, met bool) error {
	switch output {
	case "table":
	case "json":
		s.JSON = true
	default:
		return fmt.Errorf("-o: unknown output %q, there are table and json", output)
	}
	if s.Rounds < 1 || s.Rounds > maxRounds || s.Duration < minDuration || s.Duration > maxDuration || !met || arguments > 0 {
		return fmt.Errorf("want -rounds from 1 to %d, -time from %v to %v%s, and no arguments", maxRounds, minDuration, maxDuration, limits)
	}
	return nil
}

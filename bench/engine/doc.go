// SPDX-License-Identifier: Apache-2.0

// Package engine compares paths between a client and a server: it decides what is
// measured over which path and when, and it owns the results. Where the paths are, in
// network namespaces or between guests, is the matter of a [Bed].
//
//	func main() { engine.Main("bench", runWorker, run) }
//
//	func run(ctx context.Context, args []string) error {
//		var s engine.Settings
//		f := flag.NewFlagSet("bench", flag.ContinueOnError)
//		output := s.Define(f, 400*time.Millisecond, "the workers")
//		err := f.Parse(args)
//		err = s.Check(*output, f.NArg(), "", true)
//		e, err := engine.New("bench", s)
//		return e.Run(ctx, os.Stdout, engine.Group{Name: "conn", Measure: func(ctx context.Context) error {
//			return e.Compare(ctx, "one veth pair", bed, jobs)
//		}})
//	}
//
// # The rounds
//
// A [Job] is one load with the figures that are taken of it. Every job runs over every
// path in turn, round after round, and what counts are the ratios within a round: other
// work on the machine and its clock hit all paths alike. Each round begins with another
// path, so that none always runs with the caches of the same predecessor:
//
//	start    job 1: TCP, smcr.Conn, haproxy     job 2: ...   not measured, but see Path.StartCost
//	round 1  job 1: TCP, smcr.Conn, haproxy     job 2: ...
//	round 2  job 1: smcr.Conn, haproxy, TCP     job 2: ...
//
// A path that fails ends its group; a path of a tool of others is left out from there
// on. What was measured until then, or until the program is interrupted, is printed all
// the same, and every bed is closed.
//
// # Workers
//
// A worker is the same program with the argument [WorkerArg]. It gets requests on
// its standard input and answers each on its standard output ([Serve], [Ask]), one
// JSON value per line, until its input ends. What a request is, and what it does,
// is the program's own.
//
// # Who owns what
//
// The goroutine that calls owns everything. The engine starts no other one, and calls
// the methods of a bed on that goroutine. A [Profile] and an [Opened] are their
// worker's.
//
// # Limitations
//
// A load that runs is not interrupted: it is short.
package engine

// SPDX-License-Identifier: Apache-2.0

// Package drive runs the program test/vm/peer in guests from a test outside.
//
//	err := drive.Build(ctx, l)                                       // once per lab
//	err = drive.SetUpKernel(ctx, l.Guest(0), 0)                      // rxe0 and SMC-R with the usual enterprise ID
//	s, err := drive.Serve(ctx, l.Guest(0), "10.0.0.1:5000", "-stack", "kernel")
//	c, err := drive.Dial(ctx, l.Guest(1), "-device", "soft:10.0.0.2", "-to", "10.0.0.1:5000", "-do", "echo")
//	r, err := s.Stop()
//	k, err := drive.Kernel(ctx, l.Guest(0))                          // counters, link groups, sockets
//
// # Who owns what
//
// A [Run] is a program in a guest; whoever started it ends it by Stop, Wait or
// Kill, or with the context. What it printed is kept until then.
//
// # Limitations
//
// An error of a Run has the program's last words; what went wrong on its
// connections is in its report (report.Report.Check).
package drive

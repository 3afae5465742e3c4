// SPDX-License-Identifier: Apache-2.0

// Package softload is an end of smcr.Conn over the software device, as both benches have it: one device with one or
// several stacks, as a node has one for each pod.
//
//	e, err := softload.Open(softload.Config{Addr: "10.0.0.1", Stacks: 8}, opened.Add)
//	listeners, err := e.Listen(ctx, "10.0.0.1:7100")   // a server: one listener for each stack
//	c, err := e.Dial(ctx, "10.0.0.1:7100")             // a client: the next stack to its counterpart
//
// # Who owns what
//
// The caller closes what Open opened, the newest first, and listeners and connections before.
//
// # Limitations
//
// A client's stacks find those of a server by their ports, so both have as many.
package softload

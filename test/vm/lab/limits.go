// SPDX-License-Identifier: Apache-2.0

package lab

import "time"

const (
	// maxNameLen keeps the paths of the sockets under the 108 bytes that the
	// kernel takes.
	maxNameLen = 24

	// defaultMTU lets rxe take its largest path MTU, 4096.
	defaultMTU = 9000

	// defaultMemoryMiB is enough for a kernel, two applications and a few hundred
	// megabytes of files and buffers.
	defaultMemoryMiB = 1024

	// maxDisks is how many disks a guest may have besides its root file system.
	maxDisks = 4

	// maxProcessors is how many processors a guest may have: more than this machine has are of
	// no use, and QEMU gives each a share of the translated code.
	maxProcessors = 4

	// translationMiB is how much translated code QEMU keeps of each guest. By itself it
	// keeps up to 1 GiB, and a guest that runs many programs comes to that in minutes; with
	// 384 MiB the node of a cluster forgets, and translates anew, once a minute.
	translationMiB = 512

	// bootTimeout is how long a guest may take to answer. Alone, 5 s is usual; beside
	// builds it was 20 s.
	bootTimeout = 5 * time.Minute

	// greetTimeout is how long the first greeting waits for an answer, and
	// maxGreetTimeout how long a later one does: while the guest boots a greeting may
	// be lost, and while others build it is slow.
	greetTimeout    = time.Second
	maxGreetTimeout = 10 * time.Second

	// runTimeout is for a Run whose context has no deadline. It is longer than hungAfter,
	// so that a guest that hangs is named, and not the command.
	runTimeout = 5 * time.Minute

	// killTimeout is how long a killed command of a guest may take to end.
	killTimeout = 10 * time.Second

	// pingInterval is how often a guest with running commands is asked whether it
	// is alive; hungAfter is how long it may owe the answer. A guest that computes
	// beside builds was seen to take 3 s, and there are machines with more work.
	pingInterval = time.Second
	hungAfter    = 2 * time.Minute

	// monitorTimeout is how long QEMU may take for an order.
	monitorTimeout = time.Minute

	// stopTimeout is how long a killed QEMU may take to go.
	stopTimeout = time.Minute

	// consoleInterval is how often the consoles are looked at.
	consoleInterval = 200 * time.Millisecond

	// pollInterval is how often a condition that nothing announces is looked at.
	pollInterval = 20 * time.Millisecond

	// maxBuffered is how much output of a command waits to be read; it is killed
	// when there is more.
	maxBuffered = 256 << 20

	// guestGlibcMinor is the minor version of Debian 12's C library, 2.36.
	guestGlibcMinor = 36

	// excerptLines is how much of a console goes into an error.
	excerptLines = 80
)

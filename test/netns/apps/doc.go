// SPDX-License-Identifier: Apache-2.0

// Package apps runs the test suites of other people's applications, redis, memcached
// and curl, against servers in pods, and compares what they say of pods that are not
// opted in and of pods that are.
//
// A bed is two nodes of package lab with a pod on each. Each suite runs in the
// client's network namespace, and is changed in one thing only: it starts its servers in the
// server's pod, and connects to that pod's address instead of 127.0.0.1. There are
// three beds, one for each mode: plain, where no agent knows of the pods; SMC-R, with
// holdSYNs: false; and held, the default. A part of a suite, such as a unit of
// redis', runs on all three at the same time.
//
// A test that passes over plain TCP must pass in the other modes. If one does not, its
// part is run three times more. It is an error if a test failed, was not run or was
// skipped at least twice in a mode and never over plain TCP, unless the table known
// explains that. Of redis, whose tests have random numbers in their names, only how many
// there are is compared. A part that does not come to its end over plain TCP is an error,
// too, because nothing would be compared. Tests that fail over plain TCP as well, such as
// those of loopback, do not count. Each suite must also have had connections on SMC-R.
//
//	make test-apps              # parts that take a minute or two
//	make test-apps ARGS=-long   # everything
//
// The suites are of the versions that Debian 12 has, and so are the programs under
// test. The sources are downloaded once, from the mirror of the machine's apt, and what is built of
// them is kept in the user's cache directory.
//
// # Limitations
//
// Linux, root. The suites run as root, which is how they start programs in another
// pod; these have no privilege. Tests of TLS, UDP, Unix sockets and SSH are left out.
package apps

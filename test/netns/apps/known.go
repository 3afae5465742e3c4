// SPDX-License-Identifier: Apache-2.0

package apps

import "slices"

// A difference is a test that fails in pods that are opted in and not over plain TCP,
// and why that is so.
type difference struct {
	suite, part, test string
	modes             []mode
	why               string
}

// Reasons, which README.md gives its readers, too, under Limits.
const (
	// several connections: the test writes on one connection, does not wait for
	// an answer there, and expects on another one that the server has read it.
	otherConnection = "what is written on one connection may arrive after what is written later on another one"
	// connect(): the program that sees the connection before its reset comes says that it was reset,
	// and not that it was refused; which of both is first differs.
	connectsFirst = "connect() succeeds before the destination has answered, where SYNs are not held"
)

// known are the differences that are properties of a relay, or of one without held SYNs.
var known = []difference{
	{"curl", "1 to 40", "19", []mode{smcr}, connectsFirst},
	{"curl", "1 to 99", "19", []mode{smcr}, connectsFirst},
	{"curl", "1200 to 1299", "1233", []mode{smcr}, connectsFirst},
	{"memcached", "t/daemonize.t", "7", []mode{smcr}, connectsFirst},
	{"redis", "unit/shutdown", "Temp rdb will be deleted if we use bg_unlink when shutdown", []mode{smcr}, connectsFirst},
	{"redis", "unit/networking", "Default bind address configuration handling", []mode{smcr}, connectsFirst},
	{"redis", "unit/scripting", "SHUTDOWN NOSAVE can kill a timedout script anyway", []mode{smcr}, connectsFirst},
	{
		"redis", "unit/pubsub", "PUBLISH/SUBSCRIBE after UNSUBSCRIBE without arguments",
		ours, otherConnection,
	},
	{
		"redis", "unit/pubsub", "PUBLISH/PSUBSCRIBE after PUNSUBSCRIBE without arguments",
		ours, otherConnection,
	},
	{"redis", "integration/shutdown", "Shutting down master waits for replica then aborted", ours, otherConnection},
	{"redis", "integration/shutdown", "Shutting down master waits for replica then fails", ours, otherConnection},
	{
		"redis", "unit/type/list", "BRPOPLPUSH does not affect WATCH while still blocked",
		ours, otherConnection,
	},
	{
		"redis", "unit/type/stream-cgroups", "Blocking XREADGROUP: key deleted",
		ours, otherConnection,
	},
	{
		"redis", "unit/type/stream-cgroups", "Blocking XREADGROUP: key type changed with SET",
		ours, otherConnection,
	},
	{
		"redis", "unit/type/stream-cgroups", "Blocking XREADGROUP: key type changed with transaction",
		ours, otherConnection,
	},
	{
		"redis", "unit/type/stream-cgroups", "Blocking XREADGROUP: flushed DB",
		ours, otherConnection,
	},
	{
		"redis", "unit/type/stream-cgroups", "Blocking XREADGROUP: swapped DB, key doesn't exist",
		ours, otherConnection,
	},
	{
		"redis", "unit/type/stream-cgroups", "Blocking XREADGROUP: swapped DB, key is not a stream",
		ours, otherConnection,
	},
}

// ours are the modes in which agents carry connections.
var ours = []mode{smcr, held}

// explained returns why a test fails in a mode, and "" if nobody knows.
func explained(suite, part, test string, m mode) string {
	for _, d := range known {
		if d.suite != suite || d.part != part || d.test != test {
			continue
		}
		if slices.Contains(d.modes, m) {
			return d.why
		}
	}
	return ""
}

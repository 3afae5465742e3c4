// SPDX-License-Identifier: Apache-2.0

package apps

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// redis is the suite of redis 7.0. A part is a unit, in a process of its own.
var redis = suite{
	name:     "redis",
	programs: []string{"redis-server", "redis-cli", "redis-benchmark", "tclsh"},
	prepare:  prepareRedis,
	quick:    []string{"unit/auth", "unit/protocol", "unit/quit", "unit/pubsub", "unit/type/incr", "unit/tracking"},
	all:      redisUnits,
	leftOut: map[string]string{
		"unit/printver":                   "prints a version",
		"unit/tls":                        "needs a server with TLS",
		"unit/oom-score-adj":              "about privileges, which the servers do not have",
		"integration/corrupt-dump-fuzzer": "random files, not the network",
		"integration/corrupt-dump":        "files, not the network",
		"unit/violations":                 "needs 5 GB of memory",
	},
	command: func(unit string) []string {
		args := []string{
			"tclsh", "tests/test_helper.tcl", "--single", unit, "--clients", "1",
			"--timeout", "300", "--config", "protected-mode", "no",
		}
		for _, test := range slices.Sorted(maps.Keys(redisLeftOut)) {
			args = append(args, "--skiptest", test)
		}
		return args
	},
	read: readRedis,
}

// redisLeftOut are tests that no mode runs, and why. With an agent they fail now and then for a
// known reason, and those behind them are not reached then: they wait for as long as they may,
// or end their part.
var redisLeftOut = map[string]string{
	// Two clients block on a list, the second one before the first is known to: who is served
	// first says whether the test ends.
	"BRPOPLPUSH with multiple blocked clients": otherConnection,
	// SET may arrive before XREAD, whose error nobody expects.
	"Blocking XREAD: key type changed with SET": otherConnection,
	// It fails over plain TCP, too: its own servers are in the client's pod, and it asks for them
	// in the server's. Nobody expects that redis-cli then says that the connection was reset.
	"Non-interactive non-TTY CLI: ASK redirect test": connectsFirst,
}

// prepareRedis lets the suite find the machine's programs where it expects its own,
// and its servers in the server's pod. What it uses of itself, for its own processes,
// stays on the loopback.
func prepareRedis(_ context.Context, b *bed) error {
	for program, script := range map[string]string{
		"redis-server":    "exec " + b.inServer() + ` redis-server "$@"`,
		"redis-cli":       fmt.Sprintf(`exec redis-cli -h %s "$@"`, b.server.Addr4),
		"redis-benchmark": fmt.Sprintf(`exec redis-benchmark -h %s "$@"`, b.server.Addr4),
		"redis-check-aof": `exec redis-check-aof "$@"`,
		"redis-check-rdb": `exec redis-check-rdb "$@"`,
	} {
		if err := b.program("redis", "src/"+program, script); err != nil {
			return err
		}
	}
	return b.address("redis", "tests", "-myaddr ")
}

var redisList = regexp.MustCompile(`(?s)set ::all_tests \{(.*?)\}`)

// redisUnits are the units that the suite lists itself.
func redisUnits(dir string) ([]string, error) {
	text, err := os.ReadFile(filepath.Join(dir, "tests/test_helper.tcl"))
	if err != nil {
		return nil, err
	}
	m := redisList.FindSubmatch(text)
	if m == nil {
		return nil, fmt.Errorf("%s has no list of units", filepath.Join(dir, "tests/test_helper.tcl"))
	}
	return strings.Fields(string(m[1])), nil
}

var (
	colours  = regexp.MustCompile("\x1b\\[[0-9;]*m")
	redisOK  = regexp.MustCompile(`(?m)^\[ok\]: (.*) \(\d+ ms\)$`)
	redisErr = regexp.MustCompile(`(?m)^\[err\]: (.*) in tests/\S+\.tcl$`)
	redisEnd = regexp.MustCompile(`(?m)^\[\d+/\d+ done\]: `)
)

// readRedis reads lines such as "[ok]: SET and GET an item (0 ms)". A name that is
// there again gets a number; those that failed come first.
func readRedis(out string) outcome {
	out = colours.ReplaceAllString(out, "")
	o := outcome{ends: redisEnd.MatchString(out)}
	times := map[string]int{}
	for _, lines := range []struct {
		form   *regexp.Regexp
		passed bool
	}{{redisErr, false}, {redisOK, true}} {
		for _, m := range lines.form.FindAllStringSubmatch(out, -1) {
			name := m[1]
			if times[name]++; times[name] > 1 {
				name = fmt.Sprintf("%s (%d)", name, times[name])
			}
			o[name] = lines.passed
		}
	}
	return o
}

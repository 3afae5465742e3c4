// SPDX-License-Identifier: Apache-2.0

package apps

import (
	"context"
	"path/filepath"
	"regexp"
	"slices"
)

// memcached is the suite of memcached 1.6. A part is a program of it.
var memcached = suite{
	name:     "memcached",
	programs: []string{"memcached", "perl"},
	prepare:  prepareMemcached,
	quick:    []string{"t/cas.t", "t/incrdecr.t", "t/noreply.t", "t/line-lengths.t", "t/issue_163.t", "t/quit.t", "t/binary-get.t", "t/metaget.t"},
	all: func(dir string) ([]string, error) {
		found, err := filepath.Glob(filepath.Join(dir, "t", "*.t"))
		for i, name := range found {
			found[i] = filepath.Join("t", filepath.Base(name))
		}
		slices.Sort(found)
		return found, err
	},
	leftOut: map[string]string{
		"t/64bit.t":                  "about the program, not the network",
		"t/whitespace.t":             "about the sources",
		"t/udp.t":                    "UDP",
		"t/unixsocket.t":             "Unix sockets",
		"t/binary-sasl.t":            "needs a server with SASL",
		"t/proxy.t":                  "needs a server with the proxy",
		"t/ssl_cert_refresh.t":       "TLS",
		"t/ssl_ports.t":              "TLS",
		"t/ssl_proto_version.t":      "TLS",
		"t/ssl_session_resumption.t": "TLS",
		"t/ssl_settings.t":           "TLS",
		"t/ssl_verify_modes.t":       "TLS",
	},
	command: func(part string) []string { return []string{"perl", "-It/lib", part} },
	read:    readTAP,
	stable:  true,
}

// prepareMemcached lets the suite start the machine's program in the server's pod,
// with TCP: it prefers Unix sockets where the program's help mentions them. Where
// connect succeeds before the server listens, it must not take that for its start.
func prepareMemcached(_ context.Context, b *bed) error {
	err := b.program("memcached", "memcached-debug", `case "$1" in
-h) memcached -h | grep -v unix-socket ;;
*) exec `+b.inServer()+` memcached "$@" ;;
esac`)
	if err != nil {
		return err
	}
	const module = "t/lib/MemcachedTest.pm"
	if err := b.address("memcached", "t", "LocalAddr => '"); err != nil {
		return err
	}
	// Files are named after process ids there, which are the same in all beds.
	if err := b.replace("memcached", "t", `"/tmp/`, `"`+b.dir("memcached")+"/"); err != nil {
		return err
	}
	if err := b.edit("memcached", edit{module, `    $args .= " -o relaxed_privileges";`, ""}); err != nil || b.mode != smcr {
		return err
	}
	const first = "    for (1..80) {\n"
	return b.edit("memcached", edit{module, first, first + `
        my $listens = sprintf(':%04X 0*:0000 0A', $port);
        if (system("` + b.inServer() + ` grep -qE '$listens' /proc/net/tcp /proc/net/tcp6")) {
            croak("Failed to connect: memcached not running") unless is_running($childpid);
            select undef, undef, undef, 0.25;
            next;
        }
`})
}

var (
	tapTest = regexp.MustCompile(`(?m)^(not )?ok (\d+)(.*# (?i:skip).*)?`)
	tapPlan = regexp.MustCompile(`(?m)^1\.\.(\d+)`)
)

// readTAP reads the Test Anything Protocol: "ok 1 - a name", but what says of itself that it was skipped. The names of memcached's
// tests have addresses and times in them, so that tests are told apart by their number.
func readTAP(out string) outcome {
	o := outcome{}
	last := ""
	for _, m := range tapTest.FindAllStringSubmatch(out, -1) {
		if last = m[2]; m[3] == "" {
			o[m[2]] = m[1] == ""
		}
	}
	plan := tapPlan.FindStringSubmatch(out)
	o[ends] = plan != nil && (plan[1] == last || plan[1] == "0")
	return o
}

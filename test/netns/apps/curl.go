// SPDX-License-Identifier: Apache-2.0

package apps

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// curl is the suite of curl 7.88. A part is some of its tests, by their numbers.
var curl = suite{
	name:     "curl",
	programs: []string{"curl", "perl", "gcc", "make"},
	prepare:  prepareCurl,
	quick:    []string{"1 to 40"},
	all:      curlParts,
	command: func(part string) []string {
		const without = "!IPv6 !TFTP !HTTPS !FTPS !SCP !SFTP !HTTP/2 !HTTP3 !unix-sockets"
		return []string{"sh", "-c", "cd tests && exec perl runtests.pl -a -n -s " + without + " " + part}
	},
	read:   readCurl,
	stable: true,
}

// prepareCurl lets the suite start its servers in the server's pod, and use the
// machine's curl.
func prepareCurl(_ context.Context, b *bed) error {
	if err := b.program("curl", "src/curl", `exec curl "$@"`); err != nil {
		return err
	}
	return b.edit(
		"curl",
		edit{"tests/runtests.pl", `my $HOSTIP="127.0.0.1";`, fmt.Sprintf(`my $HOSTIP="%s";`, b.server.Addr4)},
		edit{"tests/runtests.pl", `my $CLIENTIP="127.0.0.1";`, fmt.Sprintf(`my $CLIENTIP="%s";`, b.client.Addr4)},
		edit{"tests/runtests.pl", `exec("exec $cmd")`, `exec("exec ` + b.inServer() + ` $cmd")`},
	)
}

// curlParts are the numbers of all tests, a hundred to a part.
func curlParts(dir string) ([]string, error) {
	const span = 100
	found, err := filepath.Glob(filepath.Join(dir, "tests", "data", "test[0-9]*"))
	if err != nil {
		return nil, err
	}
	var parts []string
	for _, name := range found {
		n, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(name), "test"))
		if err != nil {
			continue // a Makefile's list, or the like
		}
		first := n / span * span
		if part := fmt.Sprintf("%d to %d", max(1, first), first+span-1); !slices.Contains(parts, part) {
			parts = append(parts, part)
		}
	}
	slices.Sort(parts)
	return parts, nil
}

var (
	curlOK   = regexp.MustCompile(`(?m)^test (\d+)\.\.\.OK`)
	curlFail = regexp.MustCompile(`(?m)^TESTFAIL: These test cases failed: ([\d ]+)`)
	curlEnd  = regexp.MustCompile(`(?m)^TESTDONE: \d+ tests were considered`)
)

// readCurl reads lines such as "test 0001...OK" and the list of the failed tests.
func readCurl(out string) outcome {
	o := outcome{ends: curlEnd.MatchString(out)}
	for _, m := range curlOK.FindAllStringSubmatch(out, -1) {
		o[strings.TrimLeft(m[1], "0")] = true
	}
	if m := curlFail.FindStringSubmatch(out); m != nil {
		for n := range strings.FieldsSeq(m[1]) {
			o[n] = false
		}
	}
	return o
}

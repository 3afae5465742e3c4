// SPDX-License-Identifier: Apache-2.0

package apps

import (
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestRead(t *testing.T) {
	for _, c := range []struct {
		name string
		read func(string) outcome
		out  string
		want outcome
	}{
		{
			"redis", readRedis,
			"[ready]: 12\n[\x1b[0;32mok\x1b[0m]: SET and GET (1 ms)\n[ok]: SET and GET (0 ms)\n[err]: DEL in tests/unit/a.tcl\nExpected 1\n" +
				"[ok]: in two (parts) (1200 ms)\n[1/1 \x1b[33mdone\x1b[0m]: unit/a (2 seconds)\n",
			outcome{"SET and GET": true, "SET and GET (2)": true, "DEL": false, "in two (parts)": true, ends: true},
		},
		{
			"redis, one of two failed", readRedis, "[ok]: A (1 ms)\n[err]: A in tests/unit/a.tcl\n[1/1 done]: unit/a (2 seconds)\n",
			outcome{"A": false, "A (2)": true, ends: true},
		},
		{"redis, killed", readRedis, "[ok]: A (1 ms)\n[exception]: Executing test client: I/O error\n", outcome{"A": true, ends: false}},
		{"redis, nothing", readRedis, "", outcome{ends: false}},
		{"TAP", readTAP, "1..3\nok 1 - a\nnot ok 2 - b\n# Failed\nok 3\n", outcome{"1": true, "2": false, "3": true, ends: true}},
		{"TAP, died", readTAP, "1..3\nok 1 - a\nFailed to connect\n", outcome{"1": true, ends: false}},
		{"TAP, one skipped", readTAP, "1..2\nok 1 - a\nok 2 # skip no server\n", outcome{"1": true, ends: true}},
		{"TAP, skipped", readTAP, "1..0 # SKIP no TLS\n", outcome{ends: true}},
		{"TAP, plan at the end", readTAP, "ok 1\n1..1\n", outcome{"1": true, ends: true}},
		{
			"curl", readCurl,
			"test 0001...OK (1   out of 2 , took 1.155s)\ntest 0010...\n 10: data FAILED:\nTESTDONE: 2 tests were considered during 7 seconds.\n" +
				"TESTFAIL: These test cases failed: 10 \n",
			outcome{"1": true, "10": false, ends: true},
		},
		{"curl, killed", readCurl, "test 0001...OK (1", outcome{"1": true, ends: false}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, c.read(c.out)); diff != "" {
				t.Errorf("outcome (-want +got):\n%s", diff)
			}
		})
	}
}

func TestConvicted(t *testing.T) {
	ok, bad := outcome{"a": true, ends: true}, outcome{"a": false, ends: true}
	hung := outcome{ends: false}
	other := outcome{"a 17": true, ends: true} // another name each time
	both := outcome{"a": true, "b": true, ends: true}
	stable := suite{stable: true}
	for _, c := range []struct {
		name          string
		suite         suite
		plain, other  record
		suspects, are []string
	}{
		{"all passed", suite{}, record{ok}, record{ok}, nil, nil},
		{"failed once", suite{}, record{ok, ok}, record{bad, ok}, []string{"a"}, nil},
		{"failed twice", suite{}, record{ok, ok}, record{bad, bad}, []string{"a"}, []string{"a"}},
		{"failed over plain TCP, too", suite{}, record{ok, bad}, record{bad, bad}, nil, nil},
		{"hung twice", suite{}, record{ok, ok, ok}, record{hung, ok, hung}, []string{"a", ends}, []string{"a", ends}},
		{"hangs over plain TCP, too", suite{}, record{hung, ok}, record{hung, hung}, nil, nil},
		{"a name that differs", suite{}, record{ok, ok}, record{other, other}, nil, nil},
		{"not run once", stable, record{both, both}, record{ok, both}, []string{"b"}, nil},
		{"not run twice", stable, record{both, both}, record{ok, ok}, []string{"b"}, []string{"b"}},
		{"not run over plain TCP, too", stable, record{both, ok}, record{ok, ok}, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.suspects, c.suite.suspects(c.plain, c.other)); diff != "" {
				t.Errorf("suspects (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.are, c.suite.convicted(c.plain, c.other), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("convicted (-want +got):\n%s", diff)
			}
		})
	}
}

// TestCount: of tests that have other names each time it is known how many there are.
func TestCount(t *testing.T) {
	run := func(ended bool, tests ...string) outcome {
		o := outcome{ends: ended}
		for _, test := range tests {
			o[test] = true
		}
		return o
	}
	for _, c := range []struct {
		name         string
		plain, other outcome
		are          []string
	}{
		{"as many", run(true, "a 1", "b 2"), run(true, "a 3", "b 4"), nil},
		{"more", run(true, "a 1"), run(true, "a 3", "b 4"), nil},
		{"fewer", run(true, "a 1", "b 2"), run(true, "a 3"), []string{asMany}},
		{"it did not end", run(true, "a 1"), run(false), []string{"a 1", ends}},
		{"it does not over plain TCP", run(false, "a 1", "b 2"), run(true, "a 3"), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			plain, other := record{c.plain, maps.Clone(c.plain)}, record{c.other, maps.Clone(c.other)}
			for range 2 { // again after each run
				count(plain, other)
			}
			if diff := cmp.Diff(c.are, suite{}.convicted(plain, other), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("convicted (-want +got):\n%s", diff)
			}
		})
	}
}

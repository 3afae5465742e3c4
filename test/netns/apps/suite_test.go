// SPDX-License-Identifier: Apache-2.0

package apps

import (
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
		{"redis, killed", readRedis, "[ok]: A (1 ms)\n[exception]: Executing test client: I/O error\n", outcome{"A": true, ends: false}},
		{"redis, nothing", readRedis, "", outcome{ends: false}},
		{"TAP", readTAP, "1..3\nok 1 - a\nnot ok 2 - b\n# Failed\nok 3\n", outcome{"1": true, "2": false, "3": true, ends: true}},
		{"TAP, died", readTAP, "1..3\nok 1 - a\nFailed to connect\n", outcome{"1": true, ends: false}},
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
	for _, c := range []struct {
		name          string
		plain, other  record
		suspects, are []string
	}{
		{"all passed", record{ok}, record{ok}, nil, nil},
		{"failed once", record{ok, ok}, record{bad, ok}, []string{"a"}, nil},
		{"failed twice", record{ok, ok}, record{bad, bad}, []string{"a"}, []string{"a"}},
		{"failed over plain TCP, too", record{ok, bad}, record{bad, bad}, nil, nil},
		{"hung twice", record{ok, ok, ok}, record{hung, ok, hung}, []string{"a", ends}, []string{"a", ends}},
		{"hangs over plain TCP, too", record{hung, ok}, record{hung, hung}, nil, nil},
		{"a name that differs", record{ok, ok}, record{other, other}, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.suspects, suspects(c.plain, c.other)); diff != "" {
				t.Errorf("suspects (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.are, convicted(c.plain, c.other), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("convicted (-want +got):\n%s", diff)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/demo/transcript"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// TestMain is the programs of the demo, too.
func TestMain(m *testing.M) {
	if code, is := runRole(os.Args[1:]); is {
		os.Exit(code)
	}
	os.Exit(m.Run())
}

func TestRun_usage(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		code int
	}{
		"help":         {[]string{"-help"}, 0},
		"unknown flag": {[]string{"-fast"}, transcript.ExitUsage},
		"argument":     {[]string{"now"}, transcript.ExitUsage},
		"nothing":      {[]string{"-mib", "-1"}, transcript.ExitUsage},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(tc.args, &stdout, &stderr); code != tc.code || stderr.Len() == 0 {
			t.Errorf("%s: exit code %d, %q", name, code, stderr.String())
		}
	}
}

// TestRun plays the demo with fewer bytes.
func TestRun(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.Tshark)
	var stdout, stderr bytes.Buffer
	code := run([]string{"-mib", "20", "-pcap", filepath.Join(t.TempDir(), "iwarp.pcap")}, &stdout, &stderr)
	if code != 0 {
		t.Fatalf("exit code %d\n%s\n%s", code, stdout.String(), stderr.String())
	}
	for _, want := range []string{"12 checks, all hold", "MPA Request Frame", "20 MiB by RDMA_WRITE are right"} {
		if !strings.Contains(stdout.String(), want) {
			t.Errorf("no %q in\n%s", want, stdout.String())
		}
	}
}

func TestOffer(t *testing.T) {
	o := offer{Write: 1, WriteKey: 2, Read: 3, ReadKey: 4, Sums: [depth]uint32{5, 6}}
	b := o.append(nil)
	got, err := parseOffer(b)
	if len(b) != offerLen || got != o || err != nil {
		t.Errorf("%d bytes, %+v, %v", len(b), got, err)
	}
	for _, bad := range [][]byte{nil, b[:len(b)-1], append(b, 0)} {
		if _, err := parseOffer(bad); err == nil {
			t.Errorf("%d bytes are taken", len(bad))
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// testdata is what the programs really wrote.
func testdata(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestParseCurl(t *testing.T) {
	for _, tc := range []struct {
		name, in string
		want     outcome
		bad      bool
	}{
		{name: "transfer", in: "1048576 94371840\n", want: outcome{rate: Rate{94371840, unitBytes}, bytes: 1048576}},
		{name: "rate with a fraction", in: "10 2.5", want: outcome{rate: Rate{2.5, unitBytes}, bytes: 10}},
		{name: "message", in: "curl: (56) Recv failure", bad: true},
		{name: "nothing", bad: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := parseCurl(tc.in)
			if got != tc.want || (err != nil) != tc.bad {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}

func TestParseRedis(t *testing.T) {
	r, err := parseRedis(testdata(t, "redis.csv"))
	want := 2 / (1/44444.44 + 1/45454.55)
	if err != nil || r.Unit != unitRequests || math.Abs(r.Value-want) > 0.01 {
		t.Errorf("%+v, %v, want %f", r, err, want)
	}
	for name, in := range map[string]string{
		"nothing":      "",
		"heading only": `"test","rps"`,
		"rate 0":       `"SET","0.00"`,
		"no number":    `"SET","many"`,
		"not CSV":      "Could not connect to \"Redis\": refused",
	} {
		if r, err := parseRedis(in); err == nil {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

func TestParseIperf(t *testing.T) {
	o, err := parseIperf(testdata(t, "iperf3.json"))
	if err != nil || o.bytes != 1724907520 || math.Abs(o.rate.Value-13752953964.0032/8) > 1 {
		t.Errorf("%+v, %v", o, err)
	}
	if _, err = parseIperf(testdata(t, "iperf3-error.json")); err == nil || !strings.Contains(err.Error(), "unable to connect") {
		t.Errorf("refused: %v", err)
	}
	for name, in := range map[string]string{"nothing": "", "no end": "{}", "no bytes": `{"end":{"sum_received":{"bytes":0}}}`} {
		if o, err := parseIperf(in); err == nil {
			t.Errorf("%s: %+v", name, o)
		}
	}
}

func TestUnprivileged(t *testing.T) {
	const none = "0000000000000000"
	status := func(uid, eff, nnp string) string {
		return "Name:\tcat\nUid:\t" + uid + "\t" + uid + "\t" + uid + "\t" + uid + "\nCapInh:\t" + none + "\nCapPrm:\t" + none +
			"\nCapEff:\t" + eff + "\nCapBnd:\t" + none + "\nCapAmb:\t" + none + "\nNoNewPrivs:\t" + nnp + "\n"
	}
	for _, tc := range []struct {
		name, status string
		want         bool
	}{
		{"nobody", status("65534", none, "1"), true},
		{"root", status("0", none, "1"), false},
		{"with a capability", status("65534", "0000000000000400", "1"), false},
		{"may get privileges", status("65534", none, "0"), false},
		{"empty", "", false},
	} {
		if got := unprivileged(tc.status); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestLook_atRealCapture(t *testing.T) {
	const marker = "kube-smcr-demo-dbe091de534bf8fd"
	roce, err := parseFrames(testdata(t, "underlay.txt"))
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := parseFrames(testdata(t, "trunk.txt"))
	if err != nil {
		t.Fatal(err)
	}
	var c Captured
	c.look(roce, tcp, marker)
	want := Captured{
		RoCEPackets: 7, CLCMessages: []string{"Proposal", "Accept", "Confirm"},
		// The request, and two of the packets with the answer; a payload of
		// 4096 bytes each.
		RoCEPayload: 126 + 2*4096,
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Error(diff)
	}
}

func TestLook_findsWhatShouldNotBe(t *testing.T) {
	const marker = "MARK"
	udp := []string{"eth", "ip", "udp", "infiniband"}
	for _, tc := range []struct {
		name      string
		roce, tcp []frame
		want      Captured
	}{
		{"payload on TCP", nil, []frame{{protocols: []string{"tcp"}, tcpLen: 6, payload: []byte("xMARKx")}}, Captured{TCPPayload: 6, TCPOther: 1}},
		{"payload in a SEND", []frame{{protocols: udp, udpPort: rocePort, opcode: 4, payload: []byte("MARK")}}, nil, Captured{RoCEPackets: 1}},
		{"payload on another port", []frame{{protocols: udp, udpPort: 4792, opcode: 0x0a, payload: []byte("MARK")}}, nil, Captured{}},
		{"a decline", nil, []frame{{protocols: []string{"tcp", "smc"}, tcpLen: 28, clc: []int{4}}}, Captured{CLCMessages: []string{"Decline"}}},
		{
			"malformed frames",
			[]frame{{number: 3, malformed: true}},
			[]frame{{number: 5, malformed: true}},
			Captured{MalformedFrames: []int{3, 5}},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var c Captured
			c.look(tc.roce, tc.tcp, marker)
			if diff := cmp.Diff(tc.want, c); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestParseFrames_refusesWhatIsNotAFrame(t *testing.T) {
	for name, in := range map[string]string{
		"too few fields": "1|eth",
		"no number":      "x|eth|||||||",
		"odd payload":    "1|eth||||||abc|",
	} {
		if fs, err := parseFrames(in); err == nil {
			t.Errorf("%s: %+v", name, fs)
		}
	}
}

func TestMarkedText(t *testing.T) {
	s := markedText("kube-smcr-demo-0123456789abcdef")
	if len(s) != 256<<10 || strings.Count(s, "kube-smcr-demo-0123456789abcdef") != markedLines {
		t.Errorf("%d bytes, %d markers", len(s), strings.Count(s, "kube"))
	}
}

func TestDropped(t *testing.T) {
	if s := dropped("101 packets captured\n0 packets dropped by kernel\n"); s != "" {
		t.Errorf("%q", s)
	}
	if s := dropped("101 packets captured\n7 packets dropped by kernel\n"); s == "" {
		t.Error("loss not seen")
	}
}

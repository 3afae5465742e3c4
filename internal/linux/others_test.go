// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

// inNS runs a program in a namespace.
func inNS(t testing.TB, ns *NetNS, stdin string, args ...string) {
	t.Helper()
	var out []byte
	mustDo(t, ns.Do(func() (err error) {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stdin = strings.NewReader(stdin)
		out, err = cmd.CombinedOutput()
		if err != nil {
			t.Logf("%v: %s", args, out)
		}
		return err
	}))
}

// TestFindOthers: which rules count as those of a redirector, in all three forms that rules have.
func TestFindOthers(t *testing.T) {
	nft := func(rules string) [][]string { return [][]string{{"nft", rules}} }
	legacy := func(program string, args ...string) []string { return append([]string{program}, args...) }
	for _, c := range []struct {
		name  string
		do    [][]string // a program and its arguments, or nft and what it reads
		rules string
		redir string
	}{
		{"nothing", nil, "", ""},
		{"sidecar", nft("table ip istio {\n chain out { type nat hook output priority -100; tcp dport 80 redirect to :15001\n }\n}"), "nftables table ip istio, chain out", "nftables table ip istio, chain out"},
		{
			"in a chain of its own", nft("table inet m {\n chain r { tcp dport 80 dnat ip to 10.1.1.1\n }\n chain out { type nat hook prerouting priority -100; jump r\n }\n}"),
			"nftables table inet m, chain r", "nftables table inet m, chain r",
		},
		{"tproxy", nft("table ip6 m {\n chain p { type filter hook prerouting priority -150; meta l4proto tcp tproxy to :15006\n }\n}"), "nftables table ip6 m, chain p", "nftables table ip6 m, chain p"},
		{"firewall", nft("table inet f {\n chain i { type filter hook input priority 0; ct state established accept\n }\n}"), "nftables table inet f, chain i", ""},
		{"source address only", nft("table ip n {\n chain o { type nat hook postrouting priority 100; masquerade\n }\n chain p { type nat hook output priority -100; counter\n }\n}"), "nftables table ip n, chain o", ""},
		{"chains without rules", nft("table ip n {\n chain o { type nat hook output priority -100;\n }\n}"), "", ""},
		{"bridge", nft("table bridge b {\n chain o { type filter hook output priority 0; accept\n }\n}"), "", ""},
		{"iptables-nft", [][]string{legacy("iptables-nft", "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-j", "REDIRECT", "--to-ports", "15001")}, "nftables table ip nat, chain OUTPUT", "nftables table ip nat, chain OUTPUT"},
		{"iptables", [][]string{
			legacy("iptables-legacy", "-t", "nat", "-N", "ISTIO"), legacy("iptables-legacy", "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-j", "ISTIO"),
			legacy("iptables-legacy", "-t", "nat", "-A", "ISTIO", "-p", "tcp", "-j", "REDIRECT", "--to-ports", "15001"),
		}, "iptables table nat", "iptables table nat"},
		{"ip6tables", [][]string{legacy("ip6tables-legacy", "-t", "nat", "-A", "PREROUTING", "-p", "tcp", "-j", "DNAT", "--to-destination", "[fd00::1]:80")}, "ip6tables table nat", "ip6tables table nat"},
		{"iptables without rules", [][]string{legacy("iptables-legacy", "-t", "nat", "-S")}, "", ""},
		{"iptables firewall", [][]string{legacy("iptables-legacy", "-A", "INPUT", "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP")}, "iptables table filter", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			ns := newNS(t)
			install(t, ns, testConfig(families[0])) // our own table does not count
			for _, args := range c.do {
				if args[0] == "nft" {
					inNS(t, ns, args[1], "nft", "-f", "-")
					continue
				}
				inNS(t, ns, "", args...)
			}
			got, err := FindOthers(ns)
			mustDo(t, err)
			got.Cost = 0
			if diff := cmp.Diff(Others{Rules: c.rules, Redirector: c.redir}, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestFindOthers_confused: which rules count as such that confuse the packets of the agent with those of a program, or take the
// marks or the tracking away by which they are steered.
func TestFindOthers_confused(t *testing.T) {
	const owner, marks, tracking = "match the owner of packets: ", "change the marks of packets: ", "exclude packets from connection tracking: "
	out := func(rule string) string {
		return "table inet f {\n chain o { type filter hook output priority 0; " + rule + "\n }\n}"
	}
	at := func(hook, rule string) string {
		return "table inet f {\n chain own { " + rule + "\n }\n chain o { type filter hook " + hook + " priority -150; jump own\n }\n}"
	}
	const inO, inOwn = "nftables table inet f, chain o", "nftables table inet f, chain own"
	for _, c := range []struct {
		name, nft string
		args      []string // of iptables, unless nft is given
		want      string
	}{
		{"user", out("meta skuid 1000 reject"), nil, owner + inO},
		{"users of a set", out("meta skgid { 7, 1000 } drop"), nil, owner + inO},
		{"net_cls", out("meta cgroup 7 drop"), nil, owner + inO},
		{"cgroup", out(`socket cgroupv2 level 0 "/" counter`), nil, owner + inO},
		{"user, behind postrouting", at("postrouting", "meta skuid != 0 accept"), nil, owner + inOwn},
		{"user, behind input", at("input", "meta skuid 1000 drop"), nil, owner + inOwn},
		{"user, of what is forwarded", at("forward", "meta skuid 1000 drop"), nil, ""},
		{"mark", out("tcp dport 80 meta mark set 7"), nil, marks + inO},
		{"mark of the connection", at("prerouting", "meta mark set ct mark"), nil, marks + inOwn},
		{"mark, behind input", at("input", "meta mark set 7"), nil, ""},
		{"mark, only looked at", out("meta mark 7 accept"), nil, ""},
		{"mark of the connection only", out("ct mark set 7"), nil, ""},
		{"class", out("meta priority set 1:7"), nil, ""},
		{"socket's mark", out("socket transparent 1 accept"), nil, ""},
		{"tracking", "table ip t {\n chain c { type filter hook output priority raw; ip protocol tcp notrack\n }\n}", nil, tracking + "nftables table ip t, chain c"},
		{"tracking of what came", at("prerouting", "notrack"), nil, ""},
		{"zone", out("ct zone set 7"), nil, ""},
		{"iptables-nft owner", "", []string{"iptables-nft", "-A", "OUTPUT", "-m", "owner", "--uid-owner", "1000", "-j", "DROP"}, owner + "nftables table ip filter, chain OUTPUT"},
		{"iptables-nft mark", "", []string{"iptables-nft", "-t", "mangle", "-A", "OUTPUT", "-p", "tcp", "-j", "MARK", "--set-mark", "7"}, marks + "nftables table ip mangle, chain OUTPUT"},
		{"iptables-nft connmark", "", []string{"ip6tables-nft", "-t", "mangle", "-A", "PREROUTING", "-j", "CONNMARK", "--restore-mark"}, marks + "nftables table ip6 mangle, chain PREROUTING"},
		{"iptables owner", "", []string{"iptables-legacy", "-A", "OUTPUT", "-p", "tcp", "-m", "owner", "--gid-owner", "1000", "-j", "DROP"}, owner + "iptables table filter"},
		{"ip6tables owner", "", []string{"ip6tables-legacy", "-A", "OUTPUT", "-p", "tcp", "-m", "tcp", "--dport", "80", "-m", "owner", "!", "--uid-owner", "0", "-j", "ACCEPT"}, owner + "ip6tables table filter"},
		{"iptables cgroup", "", []string{"iptables-legacy", "-A", "OUTPUT", "-m", "cgroup", "--cgroup", "7", "-j", "DROP"}, owner + "iptables table filter"},
		{"iptables mark", "", []string{"iptables-legacy", "-t", "mangle", "-A", "OUTPUT", "-j", "MARK", "--set-xmark", "0x10000/0x10000"}, marks + "iptables table mangle"},
		{"iptables-nft tracking", "", []string{"iptables-nft", "-t", "raw", "-A", "OUTPUT", "-p", "tcp", "-j", "NOTRACK"}, tracking + "nftables table ip raw, chain OUTPUT"},
		{"ip6tables-nft tracking", "", []string{"ip6tables-nft", "-t", "raw", "-A", "OUTPUT", "-p", "tcp", "-j", "CT", "--notrack"}, tracking + "nftables table ip6 raw, chain OUTPUT"},
		{"iptables-nft zone", "", []string{"iptables-nft", "-t", "raw", "-A", "OUTPUT", "-p", "tcp", "-j", "CT", "--zone", "7"}, ""},
		{"iptables tracking", "", []string{"iptables-legacy", "-t", "raw", "-A", "OUTPUT", "-p", "tcp", "-j", "NOTRACK"}, tracking + "iptables table raw"},
		{"ip6tables tracking", "", []string{"ip6tables-legacy", "-t", "raw", "-A", "OUTPUT", "-p", "tcp", "-m", "tcp", "--dport", "80", "-j", "CT", "--notrack"}, tracking + "ip6tables table raw"},
		{"iptables zone", "", []string{"iptables-legacy", "-t", "raw", "-A", "OUTPUT", "-p", "tcp", "-j", "CT", "--zone", "7"}, ""},
		{"iptables, other match", "", []string{"iptables-legacy", "-A", "OUTPUT", "-p", "tcp", "-m", "mark", "--mark", "7", "-j", "ACCEPT"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			ns := newNS(t)
			install(t, ns, testConfig(families[0])) // our own table looks at marks, and does not count
			if c.nft != "" {
				inNS(t, ns, c.nft, "nft", "-f", "-")
			} else {
				inNS(t, ns, "", c.args...)
			}
			got, err := FindOthers(ns)
			mustDo(t, err)
			if got.Confused != c.want || got.Redirector != "" || got.Rules == "" {
				t.Errorf("%+v, want %q", got, c.want)
			}
		})
	}
}

// TestFindOthers_leavesNoTable: FindOthers leaves no tables of iptables behind in a namespace that had none.
func TestFindOthers_leavesNoTable(t *testing.T) {
	ns := newNS(t)
	_, err := FindOthers(ns)
	mustDo(t, err)
	mustDo(t, ns.Do(func() error {
		for _, l := range legacies {
			if b, err := os.ReadFile(l.names); err == nil && len(b) > 0 {
				t.Errorf("%s: tables %q", l.program, b)
			}
		}
		return nil
	}))
}

// TestRedirect_caught: once another program redirects a connection of the agent, nothing more is diverted,
// unless the configuration wants to divert in spite of that.
func TestRedirect_caught(t *testing.T) {
	for _, f := range families {
		for _, then := range []WhenCaught{CaughtDirect, CaughtDrop, CaughtDivert} {
			t.Run(fmt.Sprint(f.name, " ", then), func(t *testing.T) {
				pod, r, dst := outbound(t, f, func(c *RedirectConfig) { c.WhenCaught, c.Required = then, c.Outbound })
				want(t, served(t, pod, nil, dst), "agent")
				want(t, served(t, pod, marked, dst), "server")
				if caught, err := r.Caught(); caught || err != nil {
					t.Errorf("caught %t, %v before there is a redirector", caught, err)
				}
				answer(t, listen(t, pod, nil, f.loopback, 15010), "proxy")
				inNS(t, pod, "table inet mesh {\n chain out { type nat hook output priority -99; meta mark != 0 meta l4proto tcp redirect to :15010\n }\n}", "nft", "-f", "-")
				want(t, served(t, pod, nil, dst), "agent")
				want(t, served(t, pod, marked, dst), "proxy")
				for range 2 {
					if caught, err := r.Caught(); !caught || err != nil {
						t.Errorf("caught %t, %v", caught, err)
					}
					switch then {
					case CaughtDrop:
						c, err := DialInNS(timeout(t, 200*time.Millisecond), pod, nil, f.pod, dst)
						if err == nil {
							_ = c.Close()
							t.Error("connected, want nothing")
						}
					case CaughtDirect:
						want(t, served(t, pod, nil, dst), "server")
					case CaughtDivert:
						want(t, served(t, pod, nil, dst), "agent")
					}
					cfg := testConfig(f)
					cfg.WhenCaught, cfg.Required = then, cfg.Outbound
					mustDo(t, r.Update(cfg)) // does not forget
				}
			})
		}
	}
}

// TestRedirect_caughtDrop: connections that must not go directly are dropped for a moment, and those that may
// go directly do.
func TestRedirect_caughtDrop(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, peer := newPair(t)
			answer(t, listen(t, pod, marked, f.loopback, testOutPort), "agent")
			free, must := listen(t, peer, nil, f.peer, 8001), listen(t, peer, nil, f.peer, 8002)
			answer(t, free, "free")
			answer(t, must, "must")
			cfg := testConfig(f)
			cfg.WhenCaught = CaughtDrop
			cfg.Required = []OutboundRule{
				{Prefix: f.all(), Ports: []PortRange{{8002, 8003}}},
				{Prefix: netip.PrefixFrom(f.peer, f.peer.BitLen()), Ports: []PortRange{{8003, 8003}}, Exclude: true},
			}
			install(t, pod, cfg)
			inNS(t, pod, "add element inet kube-smcr caught { 6 timeout 1m }\n", "nft", "-f", "-")
			to := func(l *net.TCPListener) netip.AddrPort { return l.Addr().(*net.TCPAddr).AddrPort() }
			want(t, served(t, pod, nil, to(free)), "free")
			if c, err := DialInNS(timeout(t, 200*time.Millisecond), pod, nil, f.pod, to(must)); err == nil {
				_ = c.Close()
				t.Error("connected to what is required, want nothing")
			}
			inNS(t, pod, "flush set inet kube-smcr caught\n", "nft", "-f", "-")
			for _, l := range []*net.TCPListener{free, must} {
				want(t, served(t, pod, nil, to(l)), "agent")
			}
		})
	}
}

// TestRedirect_notTracked: a rule that excludes packets from connection tracking, and so from the diversion, lets nothing past that
// must be on SMC-R. What need not be goes directly, and what the rule leaves out, is the agent's own or stays in the pod goes where it did.
func TestRedirect_notTracked(t *testing.T) {
	for _, f := range families {
		for _, hold := range []bool{true, false} {
			for _, when := range []WhenCaught{CaughtDirect, CaughtDrop, CaughtDivert} {
				t.Run(fmt.Sprintf("%s, held %t, %v", f.name, hold, when), func(t *testing.T) {
					h := newHeld(t, f)
					cfg := testConfig(f)
					if hold {
						cfg = testHoldConfig(t, f)
						h.serve(t, HolderConfig{Ask: askAfter(0, synqueue.Divert)}, QueueConfig{})
					}
					other, free := listen(t, h.peer, nil, f.peer, 0), listen(t, h.peer, nil, f.peer, 0)
					answer(t, other, "other")
					answer(t, free, "free")
					own := listen(t, h.pod, nil, f.pod, 0)
					answer(t, own, "own")
					cfg.WhenCaught = when
					cfg.Required = []OutboundRule{{Prefix: f.all()}, {Prefix: f.all(), Ports: []PortRange{{addrOf(free).Port(), addrOf(free).Port()}}, Exclude: true}}
					cfg.Untracked = true // those that no set selects
					h.install(t, cfg)
					for _, to := range []netip.AddrPort{h.dst, addrOf(other), addrOf(free)} {
						want(t, served(t, h.pod, nil, to), "agent")
					}
					cfg.Untracked = false
					mustDo(t, h.rules.Update(cfg))
					inNS(t, h.pod, fmt.Sprintf("table inet t {\n chain c { type filter hook output priority raw; tcp dport { %d, %d, %d } notrack\n }\n}", h.dst.Port(), addrOf(free).Port(), addrOf(own).Port()), "nft", "-f", "-")
					must, may := "refused", "refused"
					if when != CaughtDivert {
						may = "free"
					}
					if when == CaughtDirect {
						must = "server"
					}
					want(t, served(t, h.pod, nil, h.dst), must)
					want(t, served(t, h.pod, nil, addrOf(free)), may)
					want(t, served(t, h.pod, nil, addrOf(other)), "agent")
					want(t, served(t, h.pod, nil, addrOf(own)), "own")
					want(t, served(t, h.pod, marked, h.dst), "server")
				})
			}
		}
	}
}

// rulesOf makes a table with n rules that change nothing, followed by a rule that redirects if that is wanted.
func rulesOf(n int, redirect bool) string {
	var b strings.Builder
	b.WriteString("table ip many {\n chain out { type nat hook output priority -100;\n")
	for i := range n {
		fmt.Fprintf(&b, "tcp dport %d counter\n", 1+i%65535)
	}
	if redirect {
		b.WriteString("tcp dport 80 redirect to :15001\n")
	}
	b.WriteString(" }\n}\n")
	return b.String()
}

// TestFindOthers_tooMany: if a pod has more rules than are read, that counts as a redirector. The look takes a
// bounded time and memory.
func TestFindOthers_tooMany(t *testing.T) {
	for _, c := range []struct {
		name  string
		rules int
		left  allowance
		want  string
	}{
		{"all read", 50, allowance{entries: 64, bytes: 1 << 20}, "nftables table ip many, chain out"},
		{"too many", 100, allowance{entries: 64, bytes: 1 << 20}, "not looked through"},
		{"too large", 50, allowance{entries: 64, bytes: 4 << 10}, "not looked through"},
		{"too slow", timedFrom + 1, allowance{entries: 1000, bytes: 1 << 20, until: 1}, "not looked through"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ns := newNS(t)
			inNS(t, ns, rulesOf(c.rules, true), "nft", "-f", "-")
			var o Others
			mustDo(t, ns.Do(func() error {
				o.finish("nftables", o.findNft(&c.left))
				return nil
			}))
			if !strings.Contains(o.Redirector, c.want) || o.Rules == "" || o.Unknown != "" {
				t.Errorf("%+v, want a redirector with %q", o, c.want)
			}
		})
	}
}

// TestFindOthers_unreadable: the list of tables of iptables belongs to the user of the namespace, and the agent
// may be another user. Then the tables are not known. That is no error, and each of them counts as if it had
// rules.
func TestFindOthers_unreadable(t *testing.T) {
	ns := newNS(t)
	secret := filepath.Join(t.TempDir(), "ip_tables_names")
	mustDo(t, os.WriteFile(secret, []byte("nat\n"), 0o000))
	mustDo(t, os.Chown(secret, 1, 1))
	var o Others
	mustDo(t, ns.Do(func() error { // whose thread gets its capabilities back
		return withoutCaps(func() {
			l := legacies[0]
			l.names = secret
			o.finish(l.program, o.findLegacy(l, newAllowance()))
			o.finish("other", errors.New("boom"))
		}, unix.CAP_DAC_OVERRIDE, unix.CAP_DAC_READ_SEARCH)
	}))
	if o.Redirector != "" || o.Rules == "" || !strings.Contains(o.Unknown, "iptables") || !strings.Contains(o.Unknown, fs.ErrPermission.Error()) || !strings.Contains(o.Unknown, "boom") {
		t.Errorf("%+v", o)
	}
}

// withoutCaps runs f on this thread without some capabilities.
func withoutCaps(f func(), caps ...int) error {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var was [2]unix.CapUserData
	if err := unix.Capget(&h, &was[0]); err != nil {
		return err
	}
	now := was
	for _, c := range caps {
		now[c/32].Effective &^= 1 << (c % 32)
	}
	if err := unix.Capset(&h, &now[0]); err != nil {
		return err
	}
	f()
	return unix.Capset(&h, &was[0])
}

// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/records"
)

// Probe tells what this machine and this process lack for the whole package:
// the joined errors of ProbeNetNS, ProbeNftables, ProbeTProxy, ProbeTransparent
// and ProbeSysctl, each a *FeatureError. Features that the package can do without are not
// among them. The probes work in namespaces of their own and leave nothing behind.
func Probe() error {
	if err := ProbeNetNS(); err != nil {
		return err // no other probe can work
	}
	return errors.Join(ProbeNftables(), ProbeTProxy(), ProbeTransparent(), ProbeSysctl())
}

// feature makes a *FeatureError of an error of the kernel; nil stays nil.
func feature(name, remedy string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		remedy = "run the agent as root with CAP_NET_ADMIN and CAP_SYS_ADMIN"
	}
	return &FeatureError{Feature: name, Remedy: remedy, Err: err}
}

// isPassing tells whether an error of a probe is about what the process or the machine is short of now, or the kernel is slow.
func isPassing(err error) bool {
	return records.IsShortage(err) || errors.Is(err, os.ErrDeadlineExceeded)
}

// ProbeNetNS tells whether this process can enter network namespaces.
func ProbeNetNS() error {
	return feature("network namespaces", "use a kernel with CONFIG_NET_NS", inScratch(func() error { return nil }))
}

// inScratch runs f in a new namespace, which ends after f.
func inScratch(f func() error) error {
	ns, err := ScratchNetNS()
	if err != nil {
		return err
	}
	return errors.Join(ns.Do(f), ns.Close())
}

// nftFeatures are the features of nf_tables that our tables need, the most basic first,
// each with a minimal table that uses it.
func nftFeatures() []struct {
	name, remedy string
	build        func(*ruleset)
} {
	base := func(r *ruleset, kind nftables.ChainType, hook *nftables.ChainHook) *nftables.Chain {
		return r.chain(nftables.Chain{Name: "probe", Type: kind, Hooknum: hook, Priority: nftables.ChainPriorityMangle})
	}
	pre := func(r *ruleset) *nftables.Chain {
		return base(r, nftables.ChainTypeFilter, nftables.ChainHookPrerouting)
	}
	return []struct {
		name, remedy string
		build        func(*ruleset)
	}{
		{"nftables: inet tables", "load the module nf_tables (CONFIG_NF_TABLES_INET)", func(*ruleset) {}},
		{"nftables: sets with timeouts", "use Linux 5.6 or later", func(r *ruleset) {
			r.set(aliveSet(r.table), aliveElement(DefaultFailOpenTTL))
		}},
		{"nftables: intervals of concatenations", "use Linux 5.6 or later", func(r *ruleset) {
			all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
			r.destinations(destinationSet(r.table, true), "Outbound", []OutboundRule{{Prefix: all}}, true)
		}},
		{"nftables: redirect in inet tables", "load the modules nft_chain_nat and nft_redir (CONFIG_NFT_NAT, CONFIG_NFT_REDIR)", func(r *ruleset) {
			r.rule(base(r, nftables.ChainTypeNAT, nftables.ChainHookOutput), tcpHeader(), []expr.Any{
				&expr.Immediate{Register: regA, Data: be16(1)}, &expr.Redir{RegisterProtoMin: regA},
			})
		}},
		{"nftables: match on a TCP option", "load the module nft_exthdr or use a kernel of which it is part (CONFIG_NFT_EXTHDR before Linux 4.20)", func(r *ruleset) {
			r.rule(pre(r), tcpHeader(), smcOption())
		}},
		{"nftables: match on a socket", "load the module nft_socket (CONFIG_NFT_SOCKET)", func(r *ruleset) {
			r.rule(pre(r), tcpHeader(), hasSocket())
		}},
		{"nftables: connection tracking", "load the module nft_ct (CONFIG_NFT_CT)", func(r *ruleset) {
			r.rule(pre(r), destinationChanged(), []expr.Any{&expr.Notrack{}})
		}},
	}
}

// tcpHeader is "meta l4proto tcp".
func tcpHeader() []expr.Any { return metaIs(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_TCP}) }

// ProbeNftables tells whether nf_tables has all features that the redirection uses, except
// the transparent proxy.
func ProbeNftables() error {
	for _, f := range nftFeatures() {
		if err := feature(f.name, f.remedy, probeTable(f.build)); err != nil {
			return err
		}
	}
	return nil
}

// ProbeReject tells whether nf_tables can refuse connections. Without it the redirection
// drops those to the agent's listeners.
func ProbeReject() error {
	err := probeTable(func(r *ruleset) {
		c := r.chain(nftables.Chain{
			Name: "probe", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
		})
		r.rule(c, tcpHeader(), []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}})
	})
	return feature("nftables: reject", "load the module nft_reject_inet (CONFIG_NFT_REJECT_INET)", err)
}

// ProbeTProxy tells whether nf_tables has the transparent proxy.
func ProbeTProxy() error {
	err := probeTable(func(r *ruleset) {
		c := r.chain(nftables.Chain{
			Name: "probe", Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle,
		})
		for _, is4 := range []bool{true, false} {
			r.rule(c, family(is4), tcpHeader(), tproxy(is4, 1))
		}
	})
	return feature("nftables: tproxy", "load the module nft_tproxy (CONFIG_NFT_TPROXY, Linux 4.19 or later)", err)
}

// probeTable makes a table in a namespace of its own.
func probeTable(build func(*ruleset)) error {
	return inScratch(func() error {
		conn, err := newNFT()
		if err != nil {
			return err
		}
		rs := newRuleset(conn)
		conn.AddTable(rs.table)
		build(rs)
		return errors.Join(rs.commit(), conn.CloseLasting())
	})
}

// ProbeTransparent tells whether sockets can be bound to foreign addresses.
func ProbeTransparent() error {
	err := inScratch(func() error {
		for _, fam := range []int{unix.AF_INET, unix.AF_INET6} {
			fd, err := unix.Socket(fam, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if errors.Is(err, unix.EAFNOSUPPORT) && fam == unix.AF_INET6 {
				continue
			}
			if err != nil {
				return fmt.Errorf("make socket: %w", err)
			}
			if err := errors.Join(setTransparent(fd, fam == unix.AF_INET), unix.Close(fd)); err != nil {
				return err
			}
		}
		return nil
	})
	return feature("transparent sockets", "give the agent CAP_NET_ADMIN", err)
}

// ProbeSysctl tells whether the sysctls of a namespace can be written.
func ProbeSysctl() error {
	err := inScratch(func() error { return fwmarkAccept.write(1) })
	return feature("sysctl net.ipv4.tcp_fwmark_accept", "give the agent CAP_SYS_ADMIN, and a seccomp and AppArmor profile that allow it to mount proc; or mount /proc/sys read-write", err)
}

// explain adds to an error of nftables the feature that is missing, if a probe finds one.
func explain(err error) error {
	if err == nil {
		return nil
	}
	var ce *ConfigError
	if errors.As(err, &ce) {
		return err
	}
	if perr := errors.Join(ProbeNftables(), ProbeTProxy()); perr != nil {
		return errors.Join(perr, err)
	}
	return err
}

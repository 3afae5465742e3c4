// SPDX-License-Identifier: Apache-2.0

package sockets

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Options that x/sys lacks.
const (
	soNetnsCookie        = 71
	tcpFastopenNoCookie  = 34
	tcpTxDelay           = 37
	netfilterOriginalDst = 80
)

// An option is one of setsockopt and getsockopt.
type option struct {
	name, matters string
	level, number int
	// set sets it; nil: it is only read.
	set func(fd, level, number int) error
	// get reads it; nil: it is only set.
	get func(fd, level, number int) (string, error)
	// families other than AF_INET. Only the socket of a client that has no connection has them.
	family int
	// newOnly says that only such a socket is tried.
	newOnly bool
}

// toInt and toText set an option to a value.
func toInt(v int) func(fd, level, number int) error {
	return func(fd, level, number int) error { return unix.SetsockoptInt(fd, level, number, v) }
}

func toText(v string) func(fd, level, number int) error {
	return func(fd, level, number int) error { return unix.SetsockoptString(fd, level, number, v) }
}

func asInt(fd, level, number int) (string, error) {
	v, err := unix.GetsockoptInt(fd, level, number)
	return fmt.Sprint(v), err
}

func asText(fd, level, number int) (string, error) {
	v, err := unix.GetsockoptString(fd, level, number)
	return fmt.Sprintf("%q", strings.TrimRight(v, "\x00")), err
}

// asThere only tells that there is a value, which is another one each time.
func asThere(fd, level, number int) (string, error) {
	_, err := unix.GetsockoptUint64(fd, level, number)
	return "there", err
}

func toTime(fd, level, number int) error {
	return unix.SetsockoptTimeval(fd, level, number, &unix.Timeval{Sec: 7})
}

func asTime(fd, level, number int) (string, error) {
	v, err := unix.GetsockoptTimeval(fd, level, number)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%d s", v.Sec), nil
}

func toLinger(fd, level, number int) error {
	return unix.SetsockoptLinger(fd, level, number, &unix.Linger{Onoff: 1, Linger: 3})
}

func asLinger(fd, level, number int) (string, error) {
	v, err := unix.GetsockoptLinger(fd, level, number)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("on %d, %d s", v.Onoff, v.Linger), nil
}

// toFilter attaches a classic filter that takes everything.
func toFilter(fd, level, number int) error {
	all := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0xffffffff}}
	return unix.SetsockoptSockFprog(fd, level, number, &unix.SockFprog{Len: uint16(len(all)), Filter: &all[0]})
}

// toShared attaches one that chooses among the listeners of a port.
func toShared(fd, level, number int) error {
	if err := unix.SetsockoptInt(fd, level, unix.SO_REUSEPORT, 1); err != nil {
		return err
	}
	return toFilter(fd, level, number)
}

// toSignature has segments from a peer signed.
func toSignature(fd, level, number int) error {
	sig := unix.TCPMD5Sig{Addr: unix.SockaddrStorage{Family: unix.AF_INET}, Keylen: 1}
	copy(sig.Addr.Data[2:], net.IPv4(192, 0, 2, 1).To4())
	sig.Key[0] = 'k'
	return unix.SetsockoptTCPMD5Sig(fd, level, number, &sig)
}

// toRepair begins to take a socket apart or to put it together, and ends that without a word to the peer.
func toRepair(fd, level, number int) error {
	const on, offSilently = 1, -1
	if err := unix.SetsockoptInt(fd, level, number, on); err != nil {
		return err
	}
	return unix.SetsockoptInt(fd, level, number, offSilently)
}

// asOriginal reads an address, for which there is room in what another option has.
func asOriginal(fd, level, number int) (string, error) {
	_, err := unix.GetsockoptIPv6Mreq(fd, level, number)
	return "there", err
}

func asInfo(fd, level, number int) (string, error) {
	_, err := unix.GetsockoptTCPInfo(fd, level, number)
	return "there", err
}

// options are the socket options that are tried. A socket on which one was set is used for the next one, so those that
// change much are last.
func options() []option {
	const soc, tcp, ip, six = unix.SOL_SOCKET, unix.IPPROTO_TCP, unix.IPPROTO_IP, unix.IPPROTO_IPV6
	return slices.Concat([]option{
		{name: "SO_DOMAIN", matters: "programs that ask a socket they were given for its family", level: soc, number: unix.SO_DOMAIN, get: asInt},
		{name: "SO_TYPE", level: soc, number: unix.SO_TYPE, get: asInt},
		{name: "SO_PROTOCOL", matters: "programs that ask a socket they were given whether it is TCP", level: soc, number: unix.SO_PROTOCOL, get: asInt},
		{name: "SO_ACCEPTCONN", level: soc, number: unix.SO_ACCEPTCONN, get: asInt},
		{name: "SO_ERROR", level: soc, number: unix.SO_ERROR, get: asInt},
		{name: "SO_REUSEADDR", level: soc, number: unix.SO_REUSEADDR, set: toInt(1), get: asInt},
		{name: "SO_REUSEPORT", matters: "none that is known: it is set before bind", level: soc, number: unix.SO_REUSEPORT, set: toInt(1), get: asInt},
		{name: "SO_KEEPALIVE", level: soc, number: unix.SO_KEEPALIVE, set: toInt(1), get: asInt},
		{name: "SO_LINGER", level: soc, number: unix.SO_LINGER, set: toLinger, get: asLinger},
		{name: "SO_OOBINLINE", level: soc, number: unix.SO_OOBINLINE, set: toInt(1), get: asInt},
		{name: "SO_SNDBUF", level: soc, number: unix.SO_SNDBUF, set: toInt(200000), get: asInt},
		{name: "SO_RCVBUF", level: soc, number: unix.SO_RCVBUF, set: toInt(200000), get: asInt},
		{name: "SO_RCVLOWAT", level: soc, number: unix.SO_RCVLOWAT, set: toInt(1), get: asInt},
		{name: "SO_RCVTIMEO", level: soc, number: unix.SO_RCVTIMEO, set: toTime, get: asTime},
		{name: "SO_SNDTIMEO", level: soc, number: unix.SO_SNDTIMEO, set: toTime, get: asTime},
		{name: "SO_PRIORITY", level: soc, number: unix.SO_PRIORITY, set: toInt(3), get: asInt},
		{name: "SO_MARK", level: soc, number: unix.SO_MARK, set: toInt(0), get: asInt},
		{name: "SO_BINDTODEVICE", level: soc, number: unix.SO_BINDTODEVICE, set: toText("\x00"), get: asText},
		{name: "SO_BUSY_POLL", level: soc, number: unix.SO_BUSY_POLL, set: toInt(0), get: asInt},
		{name: "SO_INCOMING_CPU", matters: "servers with a thread for each processor", level: soc, number: unix.SO_INCOMING_CPU, get: asInt},
		{name: "SO_COOKIE", level: soc, number: unix.SO_COOKIE, get: asThere},
		{name: "SO_NETNS_COOKIE", level: soc, number: soNetnsCookie, get: asThere},
		{name: "SO_MAX_PACING_RATE", level: soc, number: unix.SO_MAX_PACING_RATE, set: toInt(1 << 30), get: asInt},
		{name: "SO_ZEROCOPY", matters: "programs that do not look whether they may", level: soc, number: unix.SO_ZEROCOPY, set: toInt(1), get: asInt},
		{name: "SO_TIMESTAMPING", level: soc, number: unix.SO_TIMESTAMPING, set: toInt(0), get: asInt},
		{name: "SO_TIMESTAMP", level: soc, number: unix.SO_TIMESTAMP, set: toInt(0), get: asInt},
		{name: "SO_ATTACH_FILTER", level: soc, number: unix.SO_ATTACH_FILTER, set: toFilter},
		{name: "SO_ATTACH_REUSEPORT_CBPF", matters: "servers that choose themselves which process gets a connection", level: soc, number: unix.SO_ATTACH_REUSEPORT_CBPF, set: toShared, newOnly: true},
		{name: "SO_PEEK_OFF", matters: "proxies that look into a stream, as user-mode networks of virtual machines", level: soc, number: unix.SO_PEEK_OFF, set: toInt(-1), get: asInt},
	}, tcpOptions(tcp), []option{
		{name: "IP_TOS", level: ip, number: unix.IP_TOS, set: toInt(16), get: asInt},
		{name: "IP_TTL", level: ip, number: unix.IP_TTL, set: toInt(60), get: asInt},
		{name: "IP_MTU_DISCOVER", level: ip, number: unix.IP_MTU_DISCOVER, set: toInt(2), get: asInt},
		{name: "IP_RECVERR", level: ip, number: unix.IP_RECVERR, set: toInt(0), get: asInt},
		{name: "IP_TRANSPARENT", level: ip, number: unix.IP_TRANSPARENT, set: toInt(1), get: asInt},
		{name: "IP_FREEBIND", level: ip, number: unix.IP_FREEBIND, set: toInt(1), get: asInt},
		{name: "IP_BIND_ADDRESS_NO_PORT", level: ip, number: unix.IP_BIND_ADDRESS_NO_PORT, set: toInt(1), get: asInt},
		{name: "SO_ORIGINAL_DST", level: ip, number: netfilterOriginalDst, get: asOriginal},
		{name: "IPV6_V6ONLY", level: six, number: unix.IPV6_V6ONLY, set: toInt(1), get: asInt, family: unix.AF_INET6},
		{name: "IPV6_UNICAST_HOPS", level: six, number: unix.IPV6_UNICAST_HOPS, set: toInt(60), get: asInt, family: unix.AF_INET6},
		{name: "IPV6_TCLASS", level: six, number: unix.IPV6_TCLASS, set: toInt(8), get: asInt, family: unix.AF_INET6},
		{name: "IPV6_MTU_DISCOVER", matters: "programs that set it: the kernel takes it for TCP_FASTOPEN", level: six, number: unix.IPV6_MTU_DISCOVER, set: toInt(1), get: asInt, family: unix.AF_INET6},
		{name: "TCP_ULP", matters: "kernel TLS: nginx and OpenSSL do it themselves then", level: tcp, number: unix.TCP_ULP, set: toText("tls"), get: asText},
	})
}

func tcpOptions(tcp int) []option {
	return []option{
		{name: "TCP_NODELAY", level: tcp, number: unix.TCP_NODELAY, set: toInt(1), get: asInt},
		{name: "TCP_MAXSEG", level: tcp, number: unix.TCP_MAXSEG, set: toInt(1400)},
		{name: "TCP_CORK", level: tcp, number: unix.TCP_CORK, set: toInt(0), get: asInt},
		{name: "TCP_KEEPIDLE", level: tcp, number: unix.TCP_KEEPIDLE, set: toInt(60), get: asInt},
		{name: "TCP_KEEPINTVL", level: tcp, number: unix.TCP_KEEPINTVL, set: toInt(10), get: asInt},
		{name: "TCP_KEEPCNT", level: tcp, number: unix.TCP_KEEPCNT, set: toInt(5), get: asInt},
		{name: "TCP_SYNCNT", level: tcp, number: unix.TCP_SYNCNT, set: toInt(4), get: asInt},
		{name: "TCP_LINGER2", level: tcp, number: unix.TCP_LINGER2, set: toInt(10), get: asInt},
		{name: "TCP_DEFER_ACCEPT", level: tcp, number: unix.TCP_DEFER_ACCEPT, set: toInt(5), get: asInt},
		{name: "TCP_WINDOW_CLAMP", level: tcp, number: unix.TCP_WINDOW_CLAMP, set: toInt(65535), get: asInt},
		{name: "TCP_INFO", level: tcp, number: unix.TCP_INFO, get: asInfo},
		{name: "TCP_QUICKACK", level: tcp, number: unix.TCP_QUICKACK, set: toInt(1), get: asInt},
		{name: "TCP_CONGESTION, \"reno\"", level: tcp, number: unix.TCP_CONGESTION, set: toText("reno"), get: asText},
		{name: "TCP_CONGESTION, a name of three letters", matters: "none: it is refused for its length, and in force all the same if the kernel has it", level: tcp, number: unix.TCP_CONGESTION, set: toText("abc")},
		{name: "TCP_CONGESTION, \"cubic\"", level: tcp, number: unix.TCP_CONGESTION, set: toText("cubic"), get: asText},
		{name: "TCP_USER_TIMEOUT", level: tcp, number: unix.TCP_USER_TIMEOUT, set: toInt(30000), get: asInt},
		{name: "TCP_NOTSENT_LOWAT", level: tcp, number: unix.TCP_NOTSENT_LOWAT, set: toInt(16384), get: asInt},
		{name: "TCP_SAVE_SYN", level: tcp, number: unix.TCP_SAVE_SYN, set: toInt(1), get: asInt},
		{name: "TCP_INQ", level: tcp, number: unix.TCP_INQ, set: toInt(1), get: asInt},
		{name: "TCP_TX_DELAY", level: tcp, number: tcpTxDelay, set: toInt(0), get: asInt},
		{name: "TCP_MD5SIG", level: tcp, number: unix.TCP_MD5SIG, set: toSignature, newOnly: true},
		{name: "TCP_REPAIR", level: tcp, number: unix.TCP_REPAIR, set: toRepair, get: asInt},
		{name: "TCP_FASTOPEN", matters: "none: listeners that give it work, and never on SMC-R", level: tcp, number: unix.TCP_FASTOPEN, set: toInt(5), get: asInt, newOnly: true},
		{name: "TCP_FASTOPEN_CONNECT", matters: "none: clients that set it work, and never on SMC-R", level: tcp, number: unix.TCP_FASTOPEN_CONNECT, set: toInt(1), get: asInt, newOnly: true},
		{name: "TCP_FASTOPEN_NO_COOKIE", matters: "none: clients that set it work, and never on SMC-R", level: tcp, number: tcpFastopenNoCookie, set: toInt(1), get: asInt, newOnly: true},
	}
}

// apply sets an option, reads it, and says what came of both.
func (o option) apply(fd int) (string, error) {
	set, value := "", ""
	if o.set != nil {
		var err error
		if set, err = nameOfError(o.set(fd, o.level, o.number)); err != nil {
			return "", err
		}
	}
	if o.get == nil {
		return set, nil
	}
	value, err := o.get(fd, o.level, o.number)
	if err != nil {
		if value, err = nameOfError(err); err != nil {
			return "", err
		}
	}
	if set == "" || set == "ok" || set == value {
		return value, nil
	}
	return set + ", is " + value, nil
}

// ofConnections are the options of sockets that have a connection.
func ofConnections() []option {
	return slices.DeleteFunc(options(), func(o option) bool { return o.family != 0 || o.newOnly })
}

// try tries an option on a socket that has no connection, on one that connected and on one that was accepted.
func (o option) try(p *Prober) (string, error) {
	family := unix.AF_INET
	if o.family != 0 {
		family = o.family
	}
	s, err := p.open(family, 0)
	if err != nil {
		return "", err
	}
	asNew, err := o.apply(s.fd)
	if err != nil {
		return "", err
	}
	if o.family != 0 || o.newOnly {
		return asNew, nil
	}
	connected, err := p.connectedOptions()
	if err != nil {
		return "", err
	}
	return states(asNew, connected[o.name][0], connected[o.name][1]), nil
}

// states writes what came of an option on the three kinds of sockets.
func states(asNew, connected, accepted string) string {
	switch {
	case asNew == connected && connected == accepted:
		return asNew
	case asNew == connected:
		return asNew + "; accepted: " + accepted
	case connected == accepted:
		return connected + "; before connect: " + asNew
	case asNew == accepted:
		return asNew + "; connected: " + connected
	}
	return fmt.Sprintf("before connect: %s; connected: %s; accepted: %s", asNew, connected, accepted)
}

// connectedOptions are the results of all options on a connection, of both sides: the client's first. They are
// asked for once.
func (p *Prober) connectedOptions() (map[string][2]string, error) {
	if p.options != nil {
		return p.options, nil
	}
	s, err := p.dial("options")
	if err != nil {
		return nil, err
	}
	text, err := s.line()
	if err != nil {
		return nil, errors.New("read the options of the server: " + err.Error())
	}
	var accepted map[string]string
	if err := json.Unmarshal([]byte(text), &accepted); err != nil {
		return nil, err
	}
	if s, err = p.dial("nothing"); err != nil {
		return nil, err
	}
	connected, err := applyAll(s.fd)
	if err != nil {
		return nil, err
	}
	p.options = map[string][2]string{}
	for name, result := range connected {
		p.options[name] = [2]string{result, accepted[name]}
	}
	return p.options, nil
}

// applyAll applies all options to a connection.
func applyAll(fd int) (map[string]string, error) {
	out := map[string]string{}
	for _, o := range ofConnections() {
		result, err := o.apply(fd)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", o.name, err)
		}
		out[o.name] = result
	}
	return out, nil
}

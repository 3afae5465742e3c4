// SPDX-License-Identifier: Apache-2.0

package smcnl

import (
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// The kernel's generic netlink families, and the commands that are used.
const (
	familyStats = "SMC_GEN_NETLINK"
	familyPNet  = "SMC_PNETID"

	cmdSystem     = 1
	cmdLinks      = 3
	cmdDevices    = 6
	cmdStats      = 7
	cmdFallbacks  = 8
	cmdListUEIDs  = 9
	cmdAddUEID    = 10
	cmdRemoveUEID = 11
	cmdFlushUEIDs = 12

	cmdListPNets  = 1
	cmdAddPNet    = 2
	cmdRemovePNet = 3
	cmdFlushPNets = 4
)

const (
	familyVersion  = 1
	genlHeader     = 4
	sockDiagFamily = 43 // AF_SMC
	sockDiagByFam  = 20 // SOCK_DIAG_BY_FAMILY
)

// ErrNoSMC means that the kernel has no SMC now: it was built without, or its module smc
// is not loaded.
var ErrNoSMC = errors.New("the kernel has no SMC, or its module smc is not loaded")

// exchange sends one command and returns the attributes of each answer.
func exchange(family string, cmd uint8, flags int, data ...nl.NetlinkRequestData) ([][]byte, error) {
	id, err := idOf(family)
	if err != nil {
		return nil, err
	}
	req := nl.NewNetlinkRequest(int(id), flags)
	req.AddData(&nl.Genlmsg{Command: cmd, Version: familyVersion})
	for _, d := range data {
		req.AddData(d)
	}
	msgs, err := req.Execute(unix.NETLINK_GENERIC, 0)
	return attributesOf(msgs, family, cmd, err)
}

// idOf is the number that the kernel has given a family.
func idOf(family string) (uint16, error) {
	f, err := netlink.GenlFamilyGet(family)
	if errors.Is(err, unix.ENOENT) {
		err = ErrNoSMC
	}
	if err != nil {
		return 0, fmt.Errorf("ask for netlink family %s: %w", family, err)
	}
	return f.ID, nil
}

// attributesOf takes the headers off the answers to a command.
func attributesOf(msgs [][]byte, family string, cmd uint8, err error) ([][]byte, error) {
	if err != nil {
		return nil, fmt.Errorf("command %d of netlink family %s: %w", cmd, family, err)
	}
	for i, m := range msgs {
		if len(m) < genlHeader {
			return nil, fmt.Errorf("command %d of netlink family %s: %w", cmd, family, errShort)
		}
		msgs[i] = m[genlHeader:]
	}
	return msgs, nil
}

func dump(family string, cmd uint8) ([][]byte, error) { return exchange(family, cmd, unix.NLM_F_DUMP) }

// dumpFew is dump for a list that a program with NET_ADMIN in a pod can make as long as it likes. The error is [linux.ErrTooMuch] if it
// is longer than is looked through.
func dumpFew(family string, cmd uint8) ([][]byte, error) {
	id, err := idOf(family)
	if err != nil {
		return nil, err
	}
	header := nl.Genlmsg{Command: cmd, Version: familyVersion}
	msgs, err := linux.DumpFew(unix.NETLINK_GENERIC, id, header.Serialize(), nil)
	return attributesOf(msgs, family, cmd, err)
}

func do(family string, cmd uint8, data ...nl.NetlinkRequestData) error {
	_, err := exchange(family, cmd, unix.NLM_F_ACK, data...)
	return err
}

// ReadCounters returns the counters of this network namespace.
func ReadCounters() (Counters, error) {
	msgs, err := dump(familyStats, cmdStats)
	if err != nil {
		return Counters{}, err
	}
	if len(msgs) != 1 {
		return Counters{}, fmt.Errorf("SMC statistics: %d answers, want 1", len(msgs))
	}
	c, err := decodeStats(msgs[0])
	if err != nil {
		return Counters{}, fmt.Errorf("SMC statistics: %w", err)
	}
	if msgs, err = dump(familyStats, cmdFallbacks); err != nil {
		return Counters{}, err
	}
	for _, m := range msgs {
		if err := decodeFallback(m, &c); err != nil {
			return Counters{}, fmt.Errorf("SMC fallback statistics: %w", err)
		}
	}
	return c, nil
}

// ReadSystem returns what the kernel says of itself.
func ReadSystem() (System, error) {
	msgs, err := dump(familyStats, cmdSystem)
	if err != nil {
		return System{}, err
	}
	if len(msgs) != 1 {
		return System{}, fmt.Errorf("SMC system information: %d answers, want 1", len(msgs))
	}
	return decodeSystem(msgs[0])
}

// Groups returns the kernel's link groups with their links.
func Groups() ([]Group, error) {
	msgs, err := dump(familyStats, cmdLinks)
	if err != nil {
		return nil, err
	}
	return decodeGroups(msgs)
}

// Devices returns the RDMA devices that the kernel uses for SMC-R, those of all network
// namespaces if these share them.
func Devices() ([]Device, error) {
	msgs, err := dump(familyStats, cmdDevices)
	if err != nil {
		return nil, err
	}
	var all []Device
	for _, m := range msgs {
		d, err := decodeDevice(m)
		if err != nil {
			return nil, fmt.Errorf("device of SMC-R: %w", err)
		}
		all = append(all, d)
	}
	return all, nil
}

// Sockets returns the sockets of SMC that keep wants, listening ones included; nil: all. The error is [linux.ErrTooMuch] if there are
// more than are looked through; those that were are returned all the same. A program may have very many sockets that nobody wants:
// they count for the time only that the kernel takes to list them.
func Sockets(keep func(*Socket) bool) ([]Socket, error) {
	const requestBytes, allExtensions = 52, 0x1f // family, padding, extensions, then an empty socket identity
	body := make([]byte, requestBytes)
	body[0], body[3] = sockDiagFamily, allExtensions
	return socketsOf(linux.DumpFew(unix.NETLINK_SOCK_DIAG, sockDiagByFam, body, isWanted(keep)))
}

// isWanted tells of an answer whether keep wants its socket. What cannot be decoded is kept: the caller says so.
func isWanted(keep func(*Socket) bool) func([]byte) bool {
	if keep == nil {
		return nil
	}
	return func(m []byte) bool {
		s, err := decodeSocket(m)
		return err != nil || keep(&s)
	}
}

// socketsOf decodes the answers to the question for sockets, and says why there are not more.
func socketsOf(msgs [][]byte, why error) ([]Socket, error) {
	switch {
	case errors.Is(why, linux.ErrTooMuch):
		why = fmt.Errorf("the list of the sockets of SMC: %w", why)
	case why != nil:
		return nil, fmt.Errorf("list the sockets of SMC (is the module smc_diag loaded?): %w", why)
	}
	var all []Socket
	for _, m := range msgs {
		s, err := decodeSocket(m)
		if err != nil {
			return nil, fmt.Errorf("socket of SMC: %w", err)
		}
		all = append(all, s)
	}
	return all, why
}

// UEIDs returns the user-defined enterprise IDs of the kernel.
func UEIDs() ([]string, error) {
	msgs, err := dump(familyStats, cmdListUEIDs)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, m := range msgs {
		a, err := parseAttrs(m)
		if err != nil {
			return nil, fmt.Errorf("UEID: %w", err)
		}
		all = append(all, a.text(1))
	}
	return all, nil
}

// AddUEID gives the kernel an enterprise ID. Without one in common with the
// peer it never speaks SMC-Rv2.
func AddUEID(id string) error { return do(familyStats, cmdAddUEID, ueid(id)) }

// RemoveUEID takes one away.
func RemoveUEID(id string) error { return do(familyStats, cmdRemoveUEID, ueid(id)) }

// FlushUEIDs takes all away.
func FlushUEIDs() error { return do(familyStats, cmdFlushUEIDs) }

// ueid is an enterprise ID as the kernel wants it: filled with blanks to its
// whole length.
func ueid(id string) *nl.RtAttr {
	const length = 32
	return nl.NewRtAttr(1, nl.ZeroTerminated(id+strings.Repeat(" ", max(0, length-len(id)))))
}

// PNets returns the table of physical networks of this network namespace. The error is [linux.ErrTooMuch] if it is longer than is
// looked through.
func PNets() ([]PNet, error) {
	msgs, err := dumpFew(familyPNet, cmdListPNets)
	if err != nil {
		return nil, fmt.Errorf("table of physical networks: %w", err)
	}
	var all []PNet
	for _, m := range msgs {
		a, err := parseAttrs(m)
		if err != nil {
			return nil, fmt.Errorf("pnet table: %w", err)
		}
		all = append(all, decodePNet(a))
	}
	return all, nil
}

// AddPNet says that a network device, or a port of an RDMA device, belongs to
// a physical network. The kernel takes a second RDMA device into a link group
// only if both belong to the same one.
func AddPNet(p PNet) error {
	data := []nl.NetlinkRequestData{nl.NewRtAttr(1, nl.ZeroTerminated(p.Name))}
	if p.NetDev != "" {
		data = append(data, nl.NewRtAttr(2, nl.ZeroTerminated(p.NetDev)))
	}
	if p.Device != "" {
		data = append(data, nl.NewRtAttr(3, nl.ZeroTerminated(p.Device)), nl.NewRtAttr(4, nl.Uint8Attr(p.Port)))
	}
	return do(familyPNet, cmdAddPNet, data...)
}

// RemovePNet takes a physical network out of the table, with all devices that belong to it.
// Those that other programs said belong to it go, too.
func RemovePNet(name string) error {
	return do(familyPNet, cmdRemovePNet, nl.NewRtAttr(1, nl.ZeroTerminated(name)))
}

// FlushPNets empties the table.
func FlushPNets() error { return do(familyPNet, cmdFlushPNets) }

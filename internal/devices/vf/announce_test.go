// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"encoding/hex"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestAnnouncement(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	for _, tt := range []struct {
		name, addr, want string
	}{
		{"ARP", "10.1.2.3", "ffffffffffff020000000001" + "0806" + "0001080006040001" + "0200000000010a010203" + "0000000000000a010203"},
		{
			"neighbour advertisement", "fd00::1", "333300000001020000000001" + "86dd" + "60000000" + "00203aff" +
				"fd000000000000000000000000000001" + "ff020000000000000000000000000001" +
				// The checksum was computed by another program.
				"8800" + "5a9b" + "20000000" + "fd000000000000000000000000000001" + "0201020000000001",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := hex.EncodeToString(announcement(mac, netip.MustParseAddr(tt.addr)))
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("frame (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAnnounce looks at what comes out at the other end of the cable.
func TestAnnounce(t *testing.T) {
	e := newEnv(t, 1, 1)
	w, err := e.h.Attach(t.Context(), e.request(0, 0))
	must(t, err)
	addrs := []netip.Addr{netip.MustParseAddr("10.1.0.9"), netip.MustParseAddr("fd00::9")}
	mac, err := net.ParseMAC(w.MAC)
	must(t, err)
	missing := map[string]bool{}
	for _, a := range addrs {
		missing[string(announcement(mac, a))] = true
	}
	fd := -1
	must(t, in(e.home, func(h *netlink.Handle) error {
		l, err := h.LinkByName("cable0")
		if err != nil {
			return err
		}
		all := uint16(unix.ETH_P_ALL)<<8 | uint16(unix.ETH_P_ALL)>>8
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(all)); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: l.Attrs().Index})
	}))
	defer unix.Close(fd)
	must(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}))
	must(t, Announce(t.Context(), e.pods[0].Path(), "net0", addrs))
	b := make([]byte, 2000)
	for end := time.Now().Add(5 * time.Second); len(missing) > 0 && time.Now().Before(end); {
		n, err := unix.Read(fd, b)
		if err != nil {
			break
		}
		delete(missing, string(b[:n]))
	}
	for frame := range missing {
		t.Errorf("frame %x did not come", frame)
	}
}

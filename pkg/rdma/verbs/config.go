// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// ErrNotBuilt is what Open returns in a build without cgo.
var ErrNotBuilt = errors.New("hardware verbs are not in this build: use the image of kube-smcr, or build with CGO_ENABLED=1 and libibverbs-dev; or use the software device")

// Config describes a device to open.
type Config struct {
	// Name is the RDMA device's name, as in "mlx5_0", "rocep1s0f0" or "rxe0".
	Name string
	// Port is the number of its port; 0: the only one, or the first active
	// Ethernet port.
	Port uint8
	// Addr is the IP address whose GID is used; the zero Addr: [ChooseGID]
	// chooses.
	Addr netip.Addr
	// GIDType is the type of the GID that is used; GIDTypeUnknown: RoCE v2.
	GIDType rdma.GIDType
	// TrafficClass is the traffic class of paths that have none: the byte with DSCP and ECN in the IP
	// header of RoCE v2 packets. Its upper three bits are the service level, too.
	TrafficClass uint8
	// NetDev is the network interface whose GID is used, where others have GIDs
	// at the port too: VLANs, and ipvlan children in pods. "": any.
	NetDev string
	// Interfaces looks up the network interfaces of GIDs by their indexes, and
	// leaves out those that are not there. It is called once more when the port
	// changes. nil: [InterfacesByIndex], which is right for devices whose
	// interface is in the network namespace of the process.
	Interfaces func(indexes []int) (map[int]Interface, error)
}

// Validate reports all that is wrong with c.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Name == "" {
		bad("name is empty")
	}
	if c.Addr.IsValid() && (c.Addr.IsUnspecified() || c.Addr.IsMulticast()) {
		bad("address %v is not a unicast address", c.Addr)
	}
	switch c.GIDType {
	case rdma.GIDTypeUnknown, rdma.GIDTypeRoCEv1, rdma.GIDTypeRoCEv2:
	default:
		bad("GID type %v: only RoCE v1 and RoCE v2 have GIDs that can be chosen", c.GIDType)
	}
	return errors.Join(errs...)
}

// IWARPConfig describes an iWARP device to open.
type IWARPConfig struct {
	// Name is the RDMA device's name, as in "siw0" or "cxgb4_0".
	Name string
	// Addr is an IP address of the device's network interface: where its connections begin.
	Addr netip.Addr
}

// Validate reports all that is wrong with c.
func (c IWARPConfig) Validate() error {
	var errs []error
	if c.Name == "" {
		errs = append(errs, errors.New("name is empty"))
	}
	if !c.Addr.IsValid() || c.Addr.IsUnspecified() || c.Addr.IsMulticast() {
		errs = append(errs, fmt.Errorf("address %v is not a unicast address", c.Addr))
	}
	return errors.Join(errs...)
}

// want is what c asks of a GID.
func (c Config) want() GIDWish { return GIDWish{Addr: c.Addr, Type: c.GIDType, NetDev: c.NetDev} }

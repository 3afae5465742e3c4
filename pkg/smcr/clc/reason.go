// SPDX-License-Identifier: Apache-2.0

package clc

import "fmt"

// Reason is the diagnosis code of a Decline. RFC 7609 A.2.5 leaves the codes
// to the peers; these are the ones of Linux, so that its tools and ours say
// the same.
type Reason uint32

// Diagnosis codes.
const (
	ReasonNone        Reason = 0
	ReasonMem         Reason = 0x01010000
	ReasonTimeoutCL   Reason = 0x02010000
	ReasonTimeoutAL   Reason = 0x02020000
	ReasonConfigErr   Reason = 0x03000000
	ReasonPeerNoSMC   Reason = 0x03010000
	ReasonIPSec       Reason = 0x03020000
	ReasonNoDev       Reason = 0x03030000
	ReasonNoDevD      Reason = 0x03030001
	ReasonNoDevR      Reason = 0x03030002
	ReasonNoISMv2     Reason = 0x03030003
	ReasonNoV2Ext     Reason = 0x03030004
	ReasonNoV2DExt    Reason = 0x03030005
	ReasonNoSEID      Reason = 0x03030006
	ReasonNoDevD2     Reason = 0x03030007
	ReasonNoUEID      Reason = 0x03030008
	ReasonReleaseErr  Reason = 0x03030009
	ReasonMaxConnErr  Reason = 0x0303000a
	ReasonMaxLinkErr  Reason = 0x0303000b
	ReasonVendorErr   Reason = 0x0303000c
	ReasonModeUnsupp  Reason = 0x03040000
	ReasonRMBEEC      Reason = 0x03050000
	ReasonOptUnsupp   Reason = 0x03060000
	ReasonDiffPrefix  Reason = 0x03070000
	ReasonGetVLANErr  Reason = 0x03080000
	ReasonISMVLANErr  Reason = 0x03090000
	ReasonNoActLink   Reason = 0x030a0000
	ReasonNoSrvLink   Reason = 0x030b0000
	ReasonVersMismat  Reason = 0x030c0000
	ReasonMaxDMB      Reason = 0x030d0000
	ReasonNoRoute     Reason = 0x030e0000
	ReasonNoIndirect  Reason = 0x030f0000
	ReasonSyncErr     Reason = 0x04000000
	ReasonPeerDecl    Reason = 0x05000000
	ReasonInternal    Reason = 0x09990000
	ReasonErrRToken   Reason = 0x09990001
	ReasonErrReadyLnk Reason = 0x09990002
	ReasonErrRegBuf   Reason = 0x09990003
	ReasonCreditsErr  Reason = 0x09990004
)

// describe returns the short name, as Linux's source has it, and one sentence.
func (r Reason) describe() (name, text string) {
	switch r {
	case ReasonNone:
		return "NONE", "no reason given"
	case ReasonMem:
		return "MEM", "not enough memory for buffers or queue pairs"
	case ReasonTimeoutCL:
		return "TIMEOUT_CL", "the RDMA path was not confirmed in time (CONFIRM LINK)"
	case ReasonTimeoutAL:
		return "TIMEOUT_AL", "the second RDMA path was not answered in time (ADD LINK)"
	case ReasonConfigErr:
		return "CNFERR", "configuration error"
	case ReasonPeerNoSMC:
		return "PEERNOSMC", "the peer does not speak SMC: no TCP option in its handshake"
	case ReasonIPSec:
		return "IPSEC", "IPsec protects this connection"
	case ReasonNoDev:
		return "NOSMCDEV", "no usable SMC device, or no enterprise ID in common"
	case ReasonNoDevD:
		return "NOSMCDDEV", "no usable SMC-D device"
	case ReasonNoDevR:
		return "NOSMCRDEV", "no usable RDMA device"
	case ReasonNoISMv2:
		return "NOISM2SUPP", "the hardware has no ISMv2 support"
	case ReasonNoV2Ext:
		return "NOV2EXT", "the peer's Proposal has no version 2 extension"
	case ReasonNoV2DExt:
		return "NOV2DEXT", "the peer's Proposal has no SMC-Dv2 extension"
	case ReasonNoSEID:
		return "NOSEID", "the peer's Proposal has no system enterprise ID"
	case ReasonNoDevD2:
		return "NOSMCD2DEV", "no usable SMC-Dv2 device"
	case ReasonNoUEID:
		return "NOUEID", "no enterprise ID in common"
	case ReasonReleaseErr:
		return "RELEASEERR", "the releases of SMC-Rv2 do not agree"
	case ReasonMaxConnErr:
		return "MAXCONNERR", "the numbers of connections per link group do not agree"
	case ReasonMaxLinkErr:
		return "MAXLINKERR", "the numbers of links per link group do not agree"
	case ReasonVendorErr:
		return "VENDORERR", "the vendor extensions do not agree"
	case ReasonModeUnsupp:
		return "MODEUNSUPP", "one side offers SMC-R only, the other SMC-D only"
	case ReasonRMBEEC:
		return "RMBE_EC", "the peer insists on eye catchers in RMB elements"
	case ReasonOptUnsupp:
		return "OPTUNSUPP", "a socket option in use is not supported"
	case ReasonDiffPrefix:
		return "DIFFPREFIX", "the peers are in different IP subnets, which SMC-R version 1 does not allow"
	case ReasonGetVLANErr:
		return "GETVLANERR", "the VLAN of the interface could not be read"
	case ReasonISMVLANErr:
		return "ISMVLANERR", "the ISM device did not take the VLAN"
	case ReasonNoActLink:
		return "NOACTLINK", "the link group has no active link"
	case ReasonNoSrvLink:
		return "NOSRVLINK", "the link that the server chose was not found"
	case ReasonVersMismat:
		return "VERSMISMAT", "no SMC version in common"
	case ReasonMaxDMB:
		return "MAX_DMB", "the SMC-D device has no buffers left"
	case ReasonNoRoute:
		return "NOROUTE", "no route to the peer's RDMA address"
	case ReasonNoIndirect:
		return "NOINDIRECT", "the peers differ on whether a gateway is between them"
	case ReasonSyncErr:
		return "SYNCERR", "the peers' views of the link group differ; it is made anew"
	case ReasonPeerDecl:
		return "PEERDECL", "the peer declined"
	case ReasonInternal:
		return "INTERR", "internal error"
	case ReasonErrRToken:
		return "ERR_RTOK", "the peer's RMB could not be entered in the link group"
	case ReasonErrReadyLnk:
		return "ERR_RDYLNK", "the queue pair could not be made ready"
	case ReasonErrRegBuf:
		return "ERR_REGBUF", "the RMB could not be registered, or the peer did not confirm its RKey"
	case ReasonCreditsErr:
		return "CREDITSERR", "the announcement of credits went wrong"
	}
	return "", ""
}

// String returns the name that Linux's source has for the code, or its digits
// as its tools print them.
func (r Reason) String() string {
	if name, _ := r.describe(); name != "" {
		return name
	}
	return fmt.Sprintf("0x%08x", uint32(r))
}

// Text says what the code means, for people.
func (r Reason) Text() string {
	if _, text := r.describe(); text != "" {
		return text
	}
	return fmt.Sprintf("unknown diagnosis code 0x%08x", uint32(r))
}

// Known reports whether the code has a name.
func (r Reason) Known() bool {
	name, _ := r.describe()
	return name != ""
}

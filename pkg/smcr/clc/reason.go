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
	for _, e := range [...]struct {
		r          Reason
		name, text string
	}{
		{ReasonNone, "NONE", "no reason given"},
		{ReasonMem, "MEM", "not enough memory for buffers or queue pairs"},
		{ReasonTimeoutCL, "TIMEOUT_CL", "the RDMA path was not confirmed in time (CONFIRM LINK)"},
		{ReasonTimeoutAL, "TIMEOUT_AL", "the second RDMA path was not answered in time (ADD LINK)"},
		{ReasonConfigErr, "CNFERR", "configuration error"},
		{ReasonPeerNoSMC, "PEERNOSMC", "the peer does not speak SMC: no TCP option in its handshake"},
		{ReasonIPSec, "IPSEC", "IPsec protects this connection"},
		{ReasonNoDev, "NOSMCDEV", "no usable SMC device, or no enterprise ID in common"},
		{ReasonNoDevD, "NOSMCDDEV", "no usable SMC-D device"},
		{ReasonNoDevR, "NOSMCRDEV", "no usable RDMA device"},
		{ReasonNoISMv2, "NOISM2SUPP", "the hardware has no ISMv2 support"},
		{ReasonNoV2Ext, "NOV2EXT", "the peer's Proposal has no version 2 extension"},
		{ReasonNoV2DExt, "NOV2DEXT", "the peer's Proposal has no SMC-Dv2 extension"},
		{ReasonNoSEID, "NOSEID", "the peer's Proposal has no system enterprise ID"},
		{ReasonNoDevD2, "NOSMCD2DEV", "no usable SMC-Dv2 device"},
		{ReasonNoUEID, "NOUEID", "no enterprise ID in common"},
		{ReasonReleaseErr, "RELEASEERR", "the releases of SMC-Rv2 do not agree"},
		{ReasonMaxConnErr, "MAXCONNERR", "the numbers of connections per link group do not agree"},
		{ReasonMaxLinkErr, "MAXLINKERR", "the numbers of links per link group do not agree"},
		{ReasonVendorErr, "VENDORERR", "the vendor extensions do not agree"},
		{ReasonModeUnsupp, "MODEUNSUPP", "one side offers SMC-R only, the other SMC-D only"},
		{ReasonRMBEEC, "RMBE_EC", "the peer insists on eye catchers in RMB elements"},
		{ReasonOptUnsupp, "OPTUNSUPP", "a socket option in use is not supported"},
		{ReasonDiffPrefix, "DIFFPREFIX", "the peers are in different IP subnets, which SMC-R version 1 does not allow"},
		{ReasonGetVLANErr, "GETVLANERR", "the VLAN of the interface could not be read"},
		{ReasonISMVLANErr, "ISMVLANERR", "the ISM device did not take the VLAN"},
		{ReasonNoActLink, "NOACTLINK", "the link group has no active link"},
		{ReasonNoSrvLink, "NOSRVLINK", "the link that the server chose was not found"},
		{ReasonVersMismat, "VERSMISMAT", "no SMC version in common"},
		{ReasonMaxDMB, "MAX_DMB", "the SMC-D device has no buffers left"},
		{ReasonNoRoute, "NOROUTE", "no route to the peer's RDMA address"},
		{ReasonNoIndirect, "NOINDIRECT", "the peers differ on whether a gateway is between them"},
		{ReasonSyncErr, "SYNCERR", "the peers' views of the link group differ; it is made anew"},
		{ReasonPeerDecl, "PEERDECL", "the peer declined"},
		{ReasonInternal, "INTERR", "internal error"},
		{ReasonErrRToken, "ERR_RTOK", "the peer's RMB could not be entered in the link group"},
		{ReasonErrReadyLnk, "ERR_RDYLNK", "the queue pair could not be made ready"},
		{ReasonErrRegBuf, "ERR_REGBUF", "the RMB could not be registered, or the peer did not confirm its RKey"},
		{ReasonCreditsErr, "CREDITSERR", "the announcement of credits went wrong"},
	} {
		if e.r == r {
			return e.name, e.text
		}
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

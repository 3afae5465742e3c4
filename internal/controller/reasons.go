// SPDX-License-Identifier: Apache-2.0

package controller

import "slices"

// countedReasons are the codes of agents, and unknownReason for all others. The reasons in metrics
// are of these: whoever may write to a pod can make up any number of words that look like codes,
// and each value of a label is a series that Prometheus keeps.
var countedReasons = []string{
	"", unknownReason,
	"APPLICATION", "BACKLOG", "BUDGET_CONNS", "BUDGET_MEMORY", "BUDGET_PENDING", "BUDGET_RELAYS", "BUDGET_SOCKETS", "BUDGET_SOURCE",
	"CNFERR", "CONNECT", "CREDITSERR", "DIFFPREFIX", "DRAINING", "ERR_RDYLNK", "ERR_REGBUF", "ERR_RTOK", "GETVLANERR", "INTERR",
	"IPSEC", "ISMVLANERR", "LATE", "LINK_GROUP", "MAXCONNERR", "MAXLINKERR", "MAX_DMB", "MEM", "MESH", "MODEUNSUPP", "NOACTLINK",
	"NOINDIRECT", "NOISM2SUPP", "NOROUTE", "NOSEID", "NOSMCD2DEV", "NOSMCDDEV", "NOSMCDEV", "NOSMCRDEV", "NOSRVLINK", "NOT_ATTACHED",
	"NOUEID", "NOV2DEXT", "NOV2EXT", "NO_AGENT", "NO_OPTION", "NO_POLICY", "OLD_SOCKETS", "OPTED_OUT", "OPTUNSUPP", "PEERDECL",
	"PEERNOSMC", "POD_DEVICE", "POD_FAILED", "POLICY_CHANGE", "QUEUE_PAIRS", "RELEASEERR", "RENDEZVOUS", "REQUIRED", "RMBE_EC",
	"SAME_NODE", "SYNCERR", "TIMEOUT_AL", "TIMEOUT_CL", "TRANSPORT", "UNDIVERTED", "UNKNOWN_REASON", "UNSEEN", "VENDORERR", "VERSMISMAT",
}

// counted is the reason as metrics have it.
func counted(reason string) string {
	if slices.Contains(countedReasons, reason) {
		return reason
	}
	return unknownReason
}

// SPDX-License-Identifier: Apache-2.0

package llc

const (
	// Size is the length of every message of version 1 and the least length
	// of one of version 2 (RFC 7609 A.3): what fits into a receive element
	// without a buffer of its own.
	Size = 44

	// MaxSizeV2 is the largest message of version 2: the size of the second
	// receive buffer that a Linux peer posts.
	MaxSizeV2 = 8192

	// MaxOtherLinks is the largest number of further links a new RMB can be
	// announced for: eight links make a full group (RFC 7609 A.3.5).
	MaxOtherLinks = 7

	// PairsPerContinuation is the room of ADD LINK CONTINUATION (A.3.3).
	PairsPerContinuation = 2

	// OthersPerConfirm and OthersPerContinuation are the room of CONFIRM RKEY
	// (A.3.5) and CONFIRM RKEY CONTINUATION (A.3.6) for other links' RTokens.
	OthersPerConfirm      = 2
	OthersPerContinuation = 3

	// MaxDeleteRKeys is the room of DELETE RKEY (A.3.7); the error mask has
	// one bit for each.
	MaxDeleteRKeys = 8

	// MaxDeleteRKeysV2 is what the one-byte count of version 2 can say.
	MaxDeleteRKeysV2 = 255

	// ShortDeleteRKeysV2 is how many keys a DELETE RKEY of version 2 has room for
	// that is no longer than a message of version 1.
	ShortDeleteRKeysV2 = (Size - rkeysOffset) / 4

	// MaxRequestGIDs is what the one-byte count of REQUEST ADD LINK can say.
	MaxRequestGIDs = 255

	// MaxPairsV2 is how many RToken pairs fit into ADD LINK of version 2.
	MaxPairsV2 = (MaxSizeV2 - addLinkPairsOffset) / pairSize
)

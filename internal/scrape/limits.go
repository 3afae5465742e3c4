// SPDX-License-Identifier: Apache-2.0

package scrape

import "time"

const (
	// allowedFor is how long a token that was allowed is good without asking: two
	// scrapes of the usual interval. A right that was taken away holds so long.
	allowedFor = time.Minute

	// rememberedFor is how long a token that was allowed is asked about without
	// waiting behind strangers; maxRemembered bounds them. A cluster has a few
	// Prometheuses, and each a new token every hour.
	rememberedFor = 2 * time.Hour
	maxRemembered = 64

	// reviewsPerSecond and reviewsBurst bound what tokens of strangers cost the
	// API server, per process that serves metrics.
	reviewsPerSecond = 2
	reviewsBurst     = 10
	reviewTimeout    = 5 * time.Second

	// maxToken bounds a token that is looked at. Kubernetes' have one to two KiB.
	maxToken = 16 << 10

	// maxConns are the connections of the listener; further ones wait. Scrapes are
	// few and short, and whoever may connect costs a descriptor each.
	maxConns = 32

	// ownCertFor is how long a certificate of one's own is good, and ownCertSpare
	// when the next one is made: who runs for years has one at any time.
	ownCertFor   = 90 * 24 * time.Hour
	ownCertSpare = 30 * 24 * time.Hour
	// reloadEvery is how soon a certificate that was replaced is served.
	reloadEvery = time.Minute
)

// SPDX-License-Identifier: Apache-2.0

package scrape

import "time"

const (
	// allowedFor is how long a token that was allowed is not reviewed again: two scrapes
	// at the usual interval. A right that is taken away ends after this time.
	allowedFor = time.Minute

	// unreviewedFor is how much longer it is allowed while the API server does not answer, so that metrics and alerts
	// tell of that. A right that is taken away meanwhile ends when the API server answers again.
	unreviewedFor = time.Hour

	// rememberedFor is how long a token that was allowed is reviewed again without being
	// counted among the unknown ones; maxRemembered bounds these tokens. A cluster has a
	// few Prometheuses, each with a new token every hour.
	rememberedFor = 2 * time.Hour
	maxRemembered = 64

	// reviewTimeout bounds the questions about one token.
	reviewTimeout = 5 * time.Second

	// maxSources bounds the sources whose unknown tokens are counted. If there are more at
	// the same time, they replace each other, and only allReviews bounds them.
	maxSources = 256
	// ipv6Source is the prefix of a host's own IPv6 network.
	ipv6Source = 64

	// maxToken bounds a token. Those of Kubernetes have one to two KiB.
	maxToken = 16 << 10

	// maxConns bounds the connections of the listener, each of which takes a descriptor;
	// for a further one another one is closed. Scrapes are few and short. maxSourceConns
	// bounds those of one source: a Prometheus needs one.
	maxConns       = 32
	maxSourceConns = 8

	// ownCertFor is how long a certificate that this process makes is valid, and
	// ownCertSpare how long before its end the next one is made.
	ownCertFor   = 90 * 24 * time.Hour
	ownCertSpare = 30 * 24 * time.Hour
	// reloadEvery is how soon a replaced certificate is used.
	reloadEvery = time.Minute
)

var (
	// sourceReviews and allReviews bound how often unknown tokens are reviewed by the API
	// server, per process that serves metrics. A Prometheus has a new token each hour, and
	// its replicas may have the same address, that of a node. Sixteen sources that try all
	// the time use allReviews up.
	sourceReviews = rate{interval: 8 * time.Second, burst: 4}
	allReviews    = rate{interval: 500 * time.Millisecond, burst: 16}
)

// SPDX-License-Identifier: Apache-2.0

// Package scrape protects metrics: it serves them over TLS, to clients with a token that
// Kubernetes allows `get /metrics/kube-smcr` or `get /metrics`.
//
//	guard, err := scrape.NewGuard(restConfig, log)
//	tls, err := scrape.TLS(dir, log) // dir has tls.crt and tls.key; "": a certificate of its own
//	http.Server{Handler: guard.Wrap(metrics), TLSConfig: tls}
//
// As kubelet does, it asks the API server whose token it is, and what that user may do
// (TokenReview and SubjectAccessReview). It does not ask again about a token that was
// allowed, for allowedFor. About unknown tokens it asks only as often as sourceReviews
// allows for one source, and allReviews for all sources together. A source from which a
// token was allowed lately is not bound by allReviews.
//
// # Limitations
//
// Unless a certificate is configured, clients cannot verify the server, and send their
// token to any program that answers at the address. So the token should be one that is
// allowed [OwnPath] only, as that of the chart's ServiceMonitors is.
package scrape

// SPDX-License-Identifier: Apache-2.0

// Package scrape keeps metrics to those who may read them: it serves them over
// TLS, to who has a token that Kubernetes allows `get /metrics`.
//
//	guard, err := scrape.NewGuard(restConfig, log)
//	tls, err := scrape.TLS(dir) // dir has tls.crt and tls.key; "": a certificate of its own
//	http.Server{Handler: guard.Wrap(metrics), TLSConfig: tls}
//
// Whose token it is, and whether he may, is asked of the API server (TokenReview
// and SubjectAccessReview), as kubelet does. A token that was allowed is not asked
// about again for allowedFor. Who has no such token costs the API server at most
// reviewsPerSecond, and keeps nobody out who was allowed lately.
//
// # Limitations
//
// Without a certificate from outside, clients have nothing to check this one by:
// the token then goes to whoever answers at the address.
package scrape

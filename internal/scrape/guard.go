// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Path is the path of the metrics. A client that is allowed to get it gets the metrics.
const Path = "/metrics"

// OwnPath is another path: a client that is allowed to get it gets the metrics too, but not
// those of other programs. Nothing is served there.
const OwnPath = Path + "/kube-smcr"

// A reviewer knows whether a token is allowed to read metrics.
type reviewer interface {
	review(ctx context.Context, token string) (allowed bool, err error)
}

// Guard lets requests through whose token is allowed to read metrics.
type Guard struct {
	reviewer  reviewer
	log       *slog.Logger
	strangers *sources
	now       func() time.Time

	mu sync.Mutex // guards what is below
	// allowed are the tokens that were allowed, by their hash.
	allowed map[[sha256.Size]byte]grant
}

// A grant is the memory of a token that was allowed.
type grant struct {
	until time.Time    // until then the token is allowed without asking again
	from  netip.Prefix // the source that sent it when it was reviewed
}

// NewGuard returns a guard that asks the API server.
func NewGuard(config *rest.Config, log *slog.Logger) (*Guard, error) {
	c, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("guard the metrics: %w", err)
	}
	return newGuard(cluster{c}, log), nil
}

func newGuard(r reviewer, log *slog.Logger) *Guard {
	return &Guard{
		reviewer: r, log: log, now: time.Now, strangers: newSources(), allowed: map[[sha256.Size]byte]grant{},
	}
}

// Wrap returns a handler that lets allowed requests through to h.
func (g *Guard) Wrap(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		code, text := g.judge(req)
		if code == http.StatusOK {
			h.ServeHTTP(w, req)
			return
		}
		if code == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", "Bearer")
		}
		http.Error(w, text, code)
	})
}

// judge is the HTTP status for a request, and the text of the answer if it is not OK.
func (g *Guard) judge(req *http.Request) (code int, text string) {
	scheme, token, _ := strings.Cut(req.Header.Get("Authorization"), " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > maxToken {
		return http.StatusUnauthorized, "give the token of an account of the cluster that may get " + OwnPath + " or " + Path
	}
	key, from := sha256.Sum256([]byte(token)), sourceOf(req.RemoteAddr)
	good, known := g.look(key)
	if good {
		return http.StatusOK, ""
	}
	if !known && !g.strangers.take(from, g.trusts(from), g.now()) {
		return http.StatusTooManyRequests, "too many tokens from your address that are not known here, or too many such addresses: try again in half a minute"
	}
	ctx, cancel := context.WithTimeout(req.Context(), reviewTimeout)
	defer cancel()
	allowed, err := g.reviewer.review(ctx, token)
	switch {
	case errors.Is(err, errNoUser):
		g.note(key, from, false)
		return http.StatusUnauthorized, "the token is of no account of this cluster, or is no longer good"
	case err != nil && g.trusted(key):
		return http.StatusOK, ""
	case err != nil:
		g.log.Warn("metrics refused: the API server does not answer who may read them", "err", err)
		return http.StatusServiceUnavailable, "the API server does not say whether you may: try again later"
	}
	g.note(key, from, allowed)
	if !allowed {
		return http.StatusForbidden, "this account may get neither of the non-resource URLs " + OwnPath + " and " + Path + ": bind the ClusterRole kube-smcr-metrics-reader to it"
	}
	return http.StatusOK, ""
}

// look says whether a token is allowed without asking (good), and whether it was allowed
// before (known).
func (g *Guard) look(key [sha256.Size]byte) (good, known bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	was, known := g.allowed[key]
	return known && g.now().Before(was.until), known
}

// trusted says whether a token was allowed the last time that the API server answered, not long ago. What is
// measured is wanted most while the API server is not reached.
func (g *Guard) trusted(key [sha256.Size]byte) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	was, known := g.allowed[key]
	return known && g.now().Before(was.until.Add(unreviewedFor))
}

// trusts says whether a token that was allowed lately came from the source.
func (g *Guard) trusts(from netip.Prefix) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, was := range g.allowed {
		if was.from == from {
			return true
		}
	}
	return false
}

// note remembers a token that was allowed, and forgets one that was not. Tokens that were
// never allowed are not remembered: there may be any number of them.
func (g *Guard) note(key [sha256.Size]byte, from netip.Prefix, allowed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !allowed {
		delete(g.allowed, key)
		return
	}
	now := g.now()
	g.allowed[key] = grant{until: now.Add(allowedFor), from: from}
	var oldest [sha256.Size]byte
	for k, was := range g.allowed {
		if now.Sub(was.until) > rememberedFor {
			delete(g.allowed, k)
			continue
		}
		if first, ok := g.allowed[oldest]; !ok || was.until.Before(first.until) {
			oldest = k
		}
	}
	if len(g.allowed) > maxRemembered {
		delete(g.allowed, oldest)
	}
}

// errNoUser says that a token is not valid.
var errNoUser = errors.New("the token is of no user")

// cluster asks the API server.
type cluster struct{ client kubernetes.Interface }

func (c cluster) review(ctx context.Context, token string) (allowed bool, err error) {
	who, err := c.client.AuthenticationV1().TokenReviews().Create(ctx,
		&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
	if err != nil {
		return false, fmt.Errorf("review a token: %w", err)
	}
	if !who.Status.Authenticated {
		return false, errNoUser
	}
	user := who.Status.User
	extra := make(map[string]authorizationv1.ExtraValue, len(user.Extra))
	for k, v := range user.Extra {
		extra[k] = authorizationv1.ExtraValue(v)
	}
	for _, path := range []string{OwnPath, Path} {
		if allowed, err = c.may(ctx, user, extra, path); allowed || err != nil {
			return allowed, err
		}
	}
	return false, nil
}

// may asks whether a user may get a path.
func (c cluster) may(ctx context.Context, user authenticationv1.UserInfo, extra map[string]authorizationv1.ExtraValue, path string) (bool, error) {
	answer, err := c.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: path, Verb: "get"},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, fmt.Errorf("review what %s may: %w", user.Username, err)
	}
	return answer.Status.Allowed, nil
}

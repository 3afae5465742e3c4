// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
)

// Path is what a client must be allowed to get.
const Path = "/metrics"

// A reviewer knows whether somebody with a token may read metrics.
type reviewer interface {
	review(ctx context.Context, token string) (allowed bool, err error)
}

// Guard lets those through who may read metrics.
type Guard struct {
	reviewer  reviewer
	log       *slog.Logger
	strangers flowcontrol.PassiveRateLimiter
	now       func() time.Time

	mu sync.Mutex // guards what is below
	// allowed is until when tokens are good, by their hash.
	allowed map[[sha256.Size]byte]time.Time
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
		reviewer: r, log: log, now: time.Now, allowed: map[[sha256.Size]byte]time.Time{},
		strangers: flowcontrol.NewTokenBucketPassiveRateLimiter(reviewsPerSecond, reviewsBurst),
	}
}

// Wrap returns a handler that lets those through to h who may read metrics.
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

// judge is the status of a request, and what to do if it is not OK.
func (g *Guard) judge(req *http.Request) (code int, text string) {
	scheme, token, _ := strings.Cut(req.Header.Get("Authorization"), " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > maxToken {
		return http.StatusUnauthorized, "give the token of an account of the cluster that may get " + Path
	}
	key := sha256.Sum256([]byte(token))
	good, known := g.look(key)
	if good {
		return http.StatusOK, ""
	}
	if !known && !g.strangers.TryAccept() {
		return http.StatusTooManyRequests, "too many tokens that are not known here: try again later"
	}
	ctx, cancel := context.WithTimeout(req.Context(), reviewTimeout)
	defer cancel()
	allowed, err := g.reviewer.review(ctx, token)
	switch {
	case errors.Is(err, errNoUser):
		g.note(key, false)
		return http.StatusUnauthorized, "the token is of no account of this cluster, or is no longer good"
	case err != nil:
		g.log.Warn("metrics not given: the API server does not say who may read them", "err", err)
		return http.StatusServiceUnavailable, "the API server does not say whether you may: try again later"
	}
	g.note(key, allowed)
	if !allowed {
		return http.StatusForbidden, "this account may not get the non-resource URL " + Path + ": bind a ClusterRole to it that allows that"
	}
	return http.StatusOK, ""
}

// look says whether a token is good without asking, and whether it was before.
func (g *Guard) look(key [sha256.Size]byte) (good, known bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	until, known := g.allowed[key]
	return known && g.now().Before(until), known
}

// note remembers who was allowed. Strangers are not remembered: there may be any
// number of them.
func (g *Guard) note(key [sha256.Size]byte, allowed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !allowed {
		delete(g.allowed, key)
		return
	}
	now := g.now()
	g.allowed[key] = now.Add(allowedFor)
	var oldest [sha256.Size]byte
	for k, until := range g.allowed {
		if now.Sub(until) > rememberedFor {
			delete(g.allowed, k)
		}
		if first, ok := g.allowed[oldest]; !ok || until.Before(first) {
			oldest = k
		}
	}
	if len(g.allowed) > maxRemembered {
		delete(g.allowed, oldest)
	}
}

// errNoUser says that a token is of nobody.
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
	may, err := c.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: Path, Verb: "get"},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, fmt.Errorf("review what %s may: %w", user.Username, err)
	}
	return may.Status.Allowed, nil
}

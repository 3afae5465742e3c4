// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// fake knows tokens without a cluster.
type fake struct {
	asked int
	users map[string]bool // by token, whether they may
	err   error
}

func (f *fake) review(_ context.Context, token string) (bool, error) {
	f.asked++
	if f.err != nil {
		return false, f.err
	}
	may, ok := f.users[token]
	if !ok {
		return false, errNoUser
	}
	return may, nil
}

// clock is a guard with a fake clock, and what it guards.
type clock struct {
	*Guard
	*fake
	at time.Time
	h  http.Handler
}

func newClock() *clock {
	f := &fake{users: map[string]bool{"prometheus": true, "somebody": false}}
	c := &clock{Guard: newGuard(f, slog.New(slog.DiscardHandler)), fake: f, at: time.Date(2026, 11, 22, 8, 0, 0, 0, time.UTC)}
	c.now = func() time.Time { return c.at }
	c.h = c.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "metrics") }))
	return c
}

// get is the answer to a request with so many Authorization headers, 0 or 1.
func (c *clock) get(authorization ...string) *httptest.ResponseRecorder {
	return c.getFrom("192.0.2.1:40000", authorization...)
}

func (c *clock) getFrom(remote string, authorization ...string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(http.MethodGet, Path, http.NoBody)
	req.RemoteAddr = remote
	for _, a := range authorization {
		req.Header.Set("Authorization", a)
	}
	w := httptest.NewRecorder()
	c.h.ServeHTTP(w, req)
	return w
}

func TestGuard_whoMay(t *testing.T) {
	for _, tt := range []struct {
		name, authorization string
		err                 error
		code                int
		asked               int
	}{
		{name: "no token", code: http.StatusUnauthorized},
		{name: "an empty token", authorization: "Bearer ", code: http.StatusUnauthorized},
		{name: "a password", authorization: "Basic cHJvbWV0aGV1czo=", code: http.StatusUnauthorized},
		{name: "a token that is too long", authorization: "Bearer " + strings.Repeat("x", maxToken+1), code: http.StatusUnauthorized},
		{name: "a token of nobody", authorization: "Bearer junk", code: http.StatusUnauthorized, asked: 1},
		{name: "somebody who may not", authorization: "Bearer somebody", code: http.StatusForbidden, asked: 1},
		{name: "somebody who may", authorization: "Bearer prometheus", code: http.StatusOK, asked: 1},
		{name: "another spelling", authorization: "bearer  prometheus", code: http.StatusOK, asked: 1},
		{name: "the API server is away", authorization: "Bearer prometheus", err: errors.New("away"), code: http.StatusServiceUnavailable, asked: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newClock()
			c.err = tt.err
			w := c.get(tt.authorization)
			if w.Code != tt.code || c.asked != tt.asked {
				t.Errorf("status %d after %d questions, want %d after %d", w.Code, c.asked, tt.code, tt.asked)
			}
			if got := w.Body.String() == "metrics"; got != (tt.code == http.StatusOK) {
				t.Errorf("the answer is %q", w.Body)
			}
			if tt.code == http.StatusUnauthorized && w.Header().Get("WWW-Authenticate") != "Bearer" {
				t.Error("it does not say that it wants a token")
			}
		})
	}
}

// TestGuard_remembers: who was allowed is asked about once a minute, and loses
// the right within it.
func TestGuard_remembers(t *testing.T) {
	c := newClock()
	for range 10 {
		c.get("Bearer prometheus")
	}
	if c.asked != 1 {
		t.Errorf("asked %d times, want 1", c.asked)
	}
	c.users["prometheus"] = false
	if w := c.get("Bearer prometheus"); w.Code != http.StatusOK {
		t.Errorf("status %d before the answer is old", w.Code)
	}
	c.at = c.at.Add(allowedFor)
	if w := c.get("Bearer prometheus"); w.Code != http.StatusForbidden {
		t.Errorf("status %d after the right was taken away", w.Code)
	}
}

// TestGuard_withoutAPIServer: who was allowed lately reads the metrics while the API server does not answer, and nobody
// else.
func TestGuard_withoutAPIServer(t *testing.T) {
	c := newClock()
	c.get("Bearer prometheus")
	c.err = errors.New("no route to host")
	for _, tt := range []struct {
		after time.Duration
		token string
		want  int
	}{
		{allowedFor, "prometheus", http.StatusOK},
		{unreviewedFor - time.Second, "prometheus", http.StatusOK},
		{0, "somebody", http.StatusServiceUnavailable},
		{time.Second, "prometheus", http.StatusServiceUnavailable},
	} {
		c.at = c.at.Add(tt.after)
		if w := c.get("Bearer " + tt.token); w.Code != tt.want {
			t.Errorf("%s: status %d, want %d", tt.token, w.Code, tt.want)
		}
	}
	c.err = nil
	c.users["prometheus"] = false
	if w := c.get("Bearer prometheus"); w.Code != http.StatusForbidden {
		t.Errorf("status %d when the API server says no again", w.Code)
	}
}

// TestAttack_metricsTokens: junk tokens do not reach the API server without end,
// take no memory, and do not keep Prometheus out.
func TestAttack_metricsTokens(t *testing.T) {
	c := newClock()
	if w := c.get("Bearer prometheus"); w.Code != http.StatusOK {
		t.Fatalf("status %d", w.Code)
	}
	asked, refused := c.asked, 0
	for i := range 1000 {
		if c.get(fmt.Sprint("Bearer junk-", i)).Code == http.StatusTooManyRequests {
			refused++
		}
	}
	if n := c.asked - asked; n > sourceReviews.burst || refused < 900 {
		t.Errorf("1000 junk tokens: asked %d times, refused %d", n, refused)
	}
	if len(c.allowed) != 1 {
		t.Errorf("%d tokens are remembered, want 1", len(c.allowed))
	}
	c.at = c.at.Add(allowedFor)
	if w := c.get("Bearer prometheus"); w.Code != http.StatusOK {
		t.Errorf("status %d for who was allowed before", w.Code)
	}
}

// TestAttack_metricsTokensOfMany: strangers with their own addresses, however many,
// do not keep Prometheus out when it comes with its next token; and one of them
// keeps out nobody who comes for the first time.
func TestAttack_metricsTokensOfMany(t *testing.T) {
	const prometheus = "192.0.2.1:40000"
	junk := func(c *clock, sources int) {
		for i := range 2 * sources * sourceReviews.burst {
			c.getFrom(fmt.Sprintf("10.%d.%d.1:1", i%sources/256, i%sources%256), fmt.Sprint("Bearer junk-", i))
		}
	}
	t.Run("the next token", func(t *testing.T) {
		c := newClock()
		if w := c.getFrom(prometheus, "Bearer prometheus"); w.Code != http.StatusOK {
			t.Fatalf("status %d", w.Code)
		}
		for hour := range 5 {
			c.at = c.at.Add(time.Hour)
			junk(c, 2*maxSources)
			next := fmt.Sprint("next-", hour)
			c.users[next] = true
			if w := c.getFrom(prometheus, "Bearer "+next); w.Code != http.StatusOK {
				t.Errorf("hour %d: status %d: %s", hour, w.Code, w.Body)
			}
		}
	})
	t.Run("the first token", func(t *testing.T) {
		c := newClock()
		junk(c, 1)
		if w := c.getFrom(prometheus, "Bearer prometheus"); w.Code != http.StatusOK {
			t.Errorf("status %d: %s", w.Code, w.Body)
		}
	})
	t.Run("one host with a network of IPv6 addresses", func(t *testing.T) {
		c := newClock()
		for i := range 1000 {
			c.getFrom(fmt.Sprintf("[2001:db8::%x]:1", i), "Bearer junk")
		}
		if c.asked > sourceReviews.burst {
			t.Errorf("asked %d times, want %d at most", c.asked, sourceReviews.burst)
		}
	})
	t.Run("what it costs", func(t *testing.T) {
		c := newClock()
		for range 12 {
			junk(c, 2*maxSources)
			c.at = c.at.Add(5 * time.Second)
		}
		if most := allReviews.burst + int(time.Minute/allReviews.interval); c.asked > most {
			t.Errorf("asked %d times in a minute, want %d at most", c.asked, most)
		}
		if n := len(c.strangers.each); n > maxSources {
			t.Errorf("%d sources are remembered, want %d at most", n, maxSources)
		}
	})
}

func TestGuard_limits(t *testing.T) {
	c := newClock()
	for i := range 3 * maxRemembered {
		c.note([32]byte{byte(i), byte(i >> 8), 1}, netip.Prefix{}, true)
		c.at = c.at.Add(time.Second)
	}
	if len(c.allowed) != maxRemembered {
		t.Errorf("%d tokens are remembered, want %d", len(c.allowed), maxRemembered)
	}
	last := 3*maxRemembered - 1
	if good, _ := c.look([32]byte{byte(last), byte(last >> 8), 1}); !good {
		t.Error("the last one was forgotten")
	}
	c.at = c.at.Add(rememberedFor + allowedFor)
	c.note([32]byte{9}, netip.Prefix{}, true)
	if len(c.allowed) != 1 {
		t.Errorf("%d tokens are remembered after hours, want 1", len(c.allowed))
	}
}

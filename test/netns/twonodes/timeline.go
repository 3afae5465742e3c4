// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// Moment is when the links of a node's groups changed.
type Moment struct {
	At    time.Duration        `json:"-"`
	MS    Millis               `json:"atMilliseconds"`
	Node  string               `json:"node"`
	Links []agentapi.LinkGroup `json:"linkGroups"` // as of smcrctl links -o json
	text  string
}

// timeline is the links of both nodes over time.
type timeline struct {
	wg   sync.WaitGroup
	stop context.CancelFunc

	mu      sync.Mutex // guards moments
	moments []Moment
}

// watchLinks looks at the links until it is stopped.
func (f *Failover) watchLinks(ctx context.Context) *timeline {
	ctx, cancel := context.WithCancel(ctx)
	t := &timeline{stop: cancel}
	for i, a := range f.agents {
		t.wg.Go(func() {
			tick := time.NewTicker(lookEvery)
			defer tick.Stop()
			was := ""
			for {
				select {
				case <-tick.C:
				case <-ctx.Done():
					return
				}
				l, err := a.API.Links(ctx)
				if err != nil {
					continue // whoever needs the agent says so
				}
				at := time.Since(f.began)
				if text := describeLinks(l.LinkGroups); text != was {
					was = text
					t.mu.Lock()
					t.moments = append(t.moments, Moment{at, Millis(at), f.lab.Nodes[i].Name, l.LinkGroups, text})
					t.mu.Unlock()
				}
			}
		})
	}
	return t
}

// between returns the changes in a stretch of time.
func (t *timeline) between(from, to time.Duration) []Moment {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []Moment
	for _, m := range t.moments {
		if m.At >= from && m.At <= to {
			out = append(out, m)
		}
	}
	return out
}

func (t *timeline) close() {
	t.stop()
	t.wg.Wait()
}

// describeLinks is one line about the links of the groups.
func describeLinks(groups []agentapi.LinkGroup) string {
	var out []string
	for _, g := range groups {
		var links []string
		for _, k := range g.Links {
			links = append(links, fmt.Sprintf("link %d %s %s", k.ID, k.Device, k.State))
		}
		out = append(out, fmt.Sprintf("group %d: %s", g.ID, describe(links, "no link")))
	}
	if len(out) == 0 {
		return "no link group"
	}
	return strings.Join(out, " | ")
}

// activeLinks counts the devices with a link in use in a group.
func activeLinks(groups []agentapi.LinkGroup, id uint32) int {
	devices := map[string]bool{}
	for _, g := range groups {
		for _, k := range g.Links {
			if g.ID == id && k.State == stateActive {
				devices[k.Device] = true
			}
		}
	}
	return len(devices)
}

// stateActive is the state of a link in use.
const stateActive = "ACTIVE"

// deviceOf returns the address of a link's RNIC.
func deviceOf(groups []agentapi.LinkGroup, group uint32, link uint8) (address string, ok bool) {
	for _, g := range groups {
		for _, k := range g.Links {
			if g.ID == group && k.ID == link {
				return strings.TrimPrefix(k.LocalGID, "::ffff:"), true
			}
		}
	}
	return "", false
}

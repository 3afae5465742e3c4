// SPDX-License-Identifier: Apache-2.0

package apps

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// lookBefore looks at the bed a moment before ctx has to end, since a part that hangs is killed then,
// and its connections with it. The returned function ends that, and returns what was seen; "" if the
// part ended in time.
func (b *bed) lookBefore(ctx context.Context) (seen func() string) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return func() string { return "" }
	}
	var text string
	done := make(chan struct{})
	timer := time.AfterFunc(time.Until(deadline)-lookTime, func() {
		defer close(done)
		text = b.look(ctx)
	})
	return func() string {
		if timer.Stop() {
			return ""
		}
		<-done
		return text
	}
}

// look returns the sockets of both pods, and what their agents say of connections and link groups.
func (b *bed) look(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	var out strings.Builder
	for i, pod := range []interface{ Entry() []string }{b.client, b.server} {
		entry := pod.Entry()
		text, err := exec.CommandContext(ctx, entry[0], append(entry[1:], "ss", "-tanpoiem")...).CombinedOutput()
		fmt.Fprintf(&out, "sockets of the pod on node %d (%v):\n%s", i+1, err, text)
		if i >= len(b.agents) {
			continue
		}
		conns, err := b.agents[i].API.Conns(ctx)
		fmt.Fprintf(&out, "its agent's connections (%v): %s\n", err, compact(conns))
		links, err := b.agents[i].API.Links(ctx)
		fmt.Fprintf(&out, "its agent's link groups (%v): %s\n", err, compact(links))
	}
	return out.String()
}

func compact(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		return []byte(err.Error())
	}
	return text
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// traffic is what a node's agent and a pod's interface count.
type traffic struct {
	conns, onSMCR, byRDMA, byTCP uint64
}

func (a traffic) sub(b traffic) traffic {
	return traffic{a.conns - b.conns, a.onSMCR - b.onSMCR, a.byRDMA - b.byRDMA, a.byTCP - b.byTCP}
}

// count reads the counters for a pod's node and the pod.
func (d *demo) count(ctx context.Context, n *lab.Node, ip string) (traffic, error) {
	var s agentapi.Status
	err := product.Eventually(ctx, "the end of connections", d.Patience, func() error {
		if err := d.P.Ask(ctx, n.Name, &s, "status"); err != nil {
			return err
		}
		if s.Conns.Live > 0 { // bytes are counted at the end
			return fmt.Errorf("%d are open", s.Conns.Live)
		}
		return nil
	})
	if err != nil {
		return traffic{}, err
	}
	ns, err := d.P.PodNetNS(ctx, n, ip)
	if err != nil {
		return traffic{}, err
	}
	out, err := n.Run(ctx, "ip", "-n", ns, "-s", "-j", "link", "show", "eth0")
	if err != nil {
		return traffic{}, err
	}
	type bytes struct {
		Bytes uint64 `json:"bytes"`
	}
	var links []struct {
		Stats struct {
			RX bytes `json:"rx"`
			TX bytes `json:"tx"`
		} `json:"stats64"`
	}
	if err := json.Unmarshal([]byte(out), &links); err != nil || len(links) != 1 {
		return traffic{}, fmt.Errorf("read the counters of eth0: %w: %s", err, out)
	}
	c := s.Conns
	return traffic{c.TotalSMCR + c.TotalTCP, c.TotalSMCR, c.BytesSMCR, links[0].Stats.RX.Bytes + links[0].Stats.TX.Bytes}, nil
}

// size writes a number of bytes for people.
func size(n uint64) string {
	const unit = 1024
	switch {
	case n < unit:
		return fmt.Sprintf("%d B", n)
	case n < unit*unit:
		return fmt.Sprintf("%.1f KiB", float64(n)/unit)
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/unit/unit)
}

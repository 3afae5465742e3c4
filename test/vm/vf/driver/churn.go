// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/smcr-io/kube-smcr/test/vm/vf/report"
)

// A churn makes many pods.
type churn struct {
	options
	network network
	free    chan string // devices that no pod has

	mu     sync.Mutex
	report report.Churn
	has    map[string]string // a MAC or an address, and the pod that has it
}

func (o options) churn(ctx context.Context) (report.Churn, error) {
	n, err := o.network()
	if err != nil {
		return report.Churn{}, err
	}
	before, err := host(o.dataDir)
	if err != nil {
		return report.Churn{}, err
	}
	devices := strings.Split(o.devices, ",")
	c := churn{options: o, network: n, free: make(chan string, len(devices)), has: map[string]string{}}
	for _, d := range devices {
		c.free <- d
	}
	pods := make(chan int)
	var workers sync.WaitGroup
	for range o.parallel {
		workers.Go(func() {
			for i := range pods {
				name := fmt.Sprintf("%s%d", o.container, i)
				if err := c.pod(ctx, name, o.rivals > 0 && i%o.rivals == 0); err != nil {
					c.wrong("%s: %v", name, err)
				}
			}
		})
	}
	for i := range o.pods {
		pods <- i
	}
	close(pods)
	workers.Wait()
	after, err := host(o.dataDir)
	if err != nil {
		return report.Churn{}, err
	}
	c.report.Differences = before.Differences(after)
	return c.report, nil
}

func (c *churn) wrong(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.report.Errors = append(c.report.Errors, fmt.Sprintf(format, args...))
}

// pod is the life of one.
func (c *churn) pod(ctx context.Context, name string, rival bool) error {
	if err := addNetNS(ctx, name); err != nil {
		return err
	}
	p := c.podNamed(name)
	p.device = <-c.free
	err := c.live(ctx, p, rival)
	del, err2 := c.network.call(ctx, "del", p)
	if err2 = must(del, err2); err2 == nil {
		c.mu.Lock()
		c.report.Del = append(c.report.Del, del.Seconds)
		c.mu.Unlock()
	}
	c.free <- p.device // also if it did not come back: then the next pod says so
	if err == nil {
		err = err2
	}
	if err2 := delNetNS(ctx, name); err == nil {
		err = err2
	}
	return err
}

func (c *churn) live(ctx context.Context, p pod, hasRival bool) error {
	add, err := c.network.call(ctx, "add", p)
	if err := must(add, err); err != nil {
		return err
	}
	release, err := c.claim(p, add)
	if err != nil {
		return err
	}
	defer release()
	if c.check {
		if err := must(c.network.call(ctx, "check", p)); err != nil {
			return err
		}
	}
	if !hasRival {
		return nil
	}
	rival := p
	rival.container += "-rival"
	rival.name += "-rival" // one of the same pod would be its next sandbox, which gets the device
	rival.netns += "-rival"
	if err := addNetNS(ctx, rival.container); err != nil {
		return err
	}
	got, err := c.network.call(ctx, "add", rival)
	if err == nil && got.Error == nil {
		err = fmt.Errorf("%s got the device of %s, %s, too", rival.container, p.container, p.device)
	}
	if err == nil {
		err = must(c.network.call(ctx, "del", rival))
	}
	if err2 := delNetNS(ctx, rival.container); err == nil {
		err = err2
	}
	return err
}

// claim remembers what a pod has that no other pod may have.
func (c *churn) claim(p pod, add report.Call) (release func(), err error) {
	var result types100.Result
	if err := json.Unmarshal(add.Result, &result); err != nil {
		return nil, fmt.Errorf("read the result: %w", err)
	}
	var things []string
	for _, i := range result.Interfaces {
		// An ipvlan interface has the MAC of its parent.
		if i.Sandbox != "" {
			things = append(things, i.Mac)
		}
	}
	for _, i := range result.IPs {
		things = append(things, i.Address.IP.String())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.report.Add = append(c.report.Add, add.Seconds)
	if len(things) < 2 {
		err = fmt.Errorf("the result has no interface with an address: %s", add.Result)
	}
	for _, thing := range things {
		if other, ok := c.has[thing]; ok && err == nil {
			err = fmt.Errorf("it has %s, which %s has too", thing, other)
		}
		c.has[thing] = p.container
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, thing := range things {
			delete(c.has, thing)
		}
	}, err
}

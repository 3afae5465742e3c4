// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// Assignments tells which devices kubelet gave to pods, by its pod resources
// API. Its methods may be called by any goroutine.
type Assignments struct {
	socket string
	others []string
	record records.Dir
	log    *slog.Logger
	now    func() time.Time

	mu       sync.Mutex                    // guards what is below
	pods     map[config.PodName]assignment // all that kubelet has
	asked    time.Time                     // when pods was known, or asked for
	err      error                         // of the last question
	mentions time.Time                     // when err was logged
	recorded map[config.PodName][]string   // what the record says
}

// assignment is what a pod got.
type assignment struct {
	ids []string
	// lost is since when kubelet says that the pod has nothing, though it had.
	lost time.Time
}

// NewAssignments asks kubelet at a socket, which may come later. Besides our own
// resources those of sriov-network-device-plugin and its like count, if they are
// named in others: vendor.com/name, or vendor.com/* for all of a vendor. What
// kubelet says is recorded in the data directory: an agent that starts while
// kubelet is away takes it from there.
func NewAssignments(dataDir, socket string, others []string, log *slog.Logger) *Assignments {
	a := &Assignments{socket: socket, others: others, record: recordOf(dataDir), log: log, now: time.Now, pods: map[config.PodName]assignment{}}
	var err error
	if a.recorded, err = readRecord(a.record); err != nil {
		log.Warn("record of the devices that pods have not read; kubelet is asked", "err", err)
	}
	for pod, ids := range a.recorded {
		a.pods[pod] = assignment{ids: ids}
	}
	return a
}

// Devices are the IDs of a pod's devices, none if it has none. It answers from
// memory, and asks kubelet at most once a second. While kubelet does not answer,
// pods have what they had.
func (a *Assignments) Devices(pod config.PodName) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	every := freshFor
	_, known := a.pods[pod]
	switch {
	case a.err != nil:
		every = askAgain
	case !known: // it is new
		every = askSoon
	}
	if now := a.now(); a.asked.IsZero() || now.Sub(a.asked) >= every {
		pods, err := a.ask()
		switch {
		case err == nil && a.err != nil:
			a.log.Info("kubelet says again which devices pods have")
		case err != nil && (a.err == nil || now.Sub(a.mentions) >= complainEvery):
			a.mentions = now
			a.log.Warn("kubelet does not say which devices pods have; they are taken to have what they had", "err", err)
		}
		if a.asked, a.err = a.now(), err; err == nil {
			a.take(pods)
		}
	}
	return a.pods[pod].ids
}

// take takes over an answer. What a pod got is its own for its life; but a
// kubelet that has just started does not know all pods yet, or not what they
// have, and a pod may follow another one of its name.
func (a *Assignments) take(pods map[config.PodName]assignment) {
	for pod, had := range a.pods {
		if len(had.ids) == 0 || len(pods[pod].ids) > 0 {
			continue
		}
		if had.lost.IsZero() {
			had.lost = a.asked
		}
		if a.asked.Sub(had.lost) < forgetAfter {
			pods[pod] = had
		}
	}
	a.pods = pods
	a.keep()
}

// keep records what pods have, if that is new.
func (a *Assignments) keep() {
	now := map[config.PodName][]string{}
	for pod, has := range a.pods {
		if len(has.ids) > 0 {
			now[pod] = has.ids
		}
	}
	if maps.EqualFunc(now, a.recorded, slices.Equal) {
		return
	}
	// Without the record all is well until kubelet and the agent are away at once.
	if err := writeRecord(a.record, now); err != nil {
		a.log.Warn("devices that pods have not recorded", "err", err)
	}
	a.recorded = now
}

// ask gets the devices of all pods. The pod resources API has a call for one
// pod, too, but not in every kubelet, and pods are many.
func (a *Assignments) ask() (map[config.PodName]assignment, error) {
	ctx, cancel := context.WithTimeout(context.Background(), askPatience)
	defer cancel()
	// There are few calls, and a connection of its own for each knows nothing of
	// kubelet's restarts.
	conn, err := dial(a.socket)
	if err != nil {
		return nil, fmt.Errorf("ask kubelet for the devices of pods: %w", err)
	}
	all, err := podresources.NewPodResourcesListerClient(conn).List(ctx, &podresources.ListPodResourcesRequest{},
		grpc.MaxCallRecvMsgSize(maxAnswerBytes))
	if err = errors.Join(err, conn.Close()); err != nil {
		return nil, fmt.Errorf("ask kubelet at %s for the devices of pods: %w", a.socket, err)
	}
	out := map[config.PodName]assignment{}
	for _, p := range all.GetPodResources() {
		out[config.PodName{Namespace: p.GetNamespace(), Name: p.GetName()}] = assignment{ids: a.devices(p)}
	}
	return out, nil
}

// devices are the IDs of what a pod got, without slots, each once.
func (a *Assignments) devices(p *podresources.PodResources) []string {
	var ids []string
	for _, c := range p.GetContainers() {
		for _, d := range c.GetDevices() {
			for _, id := range d.GetDeviceIds() {
				switch resource := d.GetResourceName(); {
				case resource == ResourceShared || resource == ResourceVF:
					ids = append(ids, DeviceID(id))
				case a.counts(resource) && isPCIAddress(id):
					ids = append(ids, strings.ToLower(id))
				}
			}
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// counts says whether devices of another plugin's resource are for us.
func (a *Assignments) counts(resource string) bool {
	return slices.ContainsFunc(a.others, func(o string) bool {
		vendor, all := strings.CutSuffix(o, "*")
		return all && strings.HasPrefix(resource, vendor) || o == resource
	})
}

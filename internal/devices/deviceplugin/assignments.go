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

// Assignments tells which devices kubelet gave to pods. It asks kubelet by the pod
// resources API. Its methods may be called by any goroutine.
type Assignments struct {
	socket string
	others []string
	record records.Dir
	log    *slog.Logger
	now    func() time.Time

	// asking is locked while kubelet is asked, so that one question serves all callers
	// that wait for an answer. It is locked before mu.
	asking sync.Mutex

	mu       sync.Mutex                    // guards what is below
	pods     map[config.PodName]assignment // kubelet's last answer
	wanted   map[config.PodName]time.Time  // when Devices was first called for a pod
	asked    time.Time                     // when the last question ended
	answered time.Time                     // when the question began that pods is the answer to
	err      error                         // the error of the last question
	mentions time.Time                     // when err was logged
	recorded map[config.PodName][]string   // the devices of pods in the record
	unkept   time.Time                     // when it was logged that the record cannot be written; zero: it could
}

// assignment is what a pod got.
type assignment struct {
	ids []string
	// lost is since when kubelet answers that the pod has no devices although it had some.
	lost time.Time
}

// NewAssignments makes Assignments that ask kubelet at a socket, which may appear later.
// Besides the resources of this package, devices of the resources in others count, for
// example of sriov-network-device-plugin: vendor.com/name, or vendor.com/* for all of a
// vendor. Kubelet's answers are recorded in the data directory, for an agent that starts
// while kubelet is away.
func NewAssignments(dataDir, socket string, others []string, log *slog.Logger) *Assignments {
	a := &Assignments{
		socket: socket, others: others, record: recordOf(dataDir), log: log, now: time.Now,
		pods: map[config.PodName]assignment{}, wanted: map[config.PodName]time.Time{},
	}
	if err := a.record.RemoveStale(); err != nil {
		log.Warn("temporary files of the record of pods' devices not removed", "err", err)
	}
	var err error
	if a.recorded, err = readRecord(a.record); err != nil {
		log.Warn("record of pods' devices cannot be read; kubelet is asked instead", "err", err)
	}
	for pod, ids := range a.recorded {
		a.pods[pod] = assignment{ids: ids}
	}
	return a
}

// Devices are the IDs of a pod's devices. It answers from memory, and asks kubelet at most
// once a second. While kubelet does not answer, a pod has the devices that it had.
//
// Devices may be called for a pod only after kubelet has admitted the pod and given it its
// devices, as it has when the CNI plugin is called. Kubelet lists a pod before that,
// without devices. So the answer that the pod has none counts only if the question began
// after the first call of Devices for the pod. Until there is such an answer, Devices asks
// soon, and waits for it.
//
//	kubelet:  pod is listed    devices are given    sandbox, CNI ADD
//	agent:               List: none                         Devices: asks again
func (a *Assignments) Devices(pod config.PodName) []string {
	switch sure := a.want(pod); {
	case !sure:
		a.asking.Lock()
	case !a.asking.TryLock(): // another caller is asking
		return a.has(pod)
	}
	defer a.asking.Unlock()
	if timeout, due := a.due(pod); due {
		began := a.now()
		pods, err := a.ask(timeout)
		a.heard(began, pods, err)
	}
	return a.has(pod)
}

// has are the pod's devices of the last answer, or of the record.
func (a *Assignments) has(pod config.PodName) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.pods[pod].ids
}

// want notes that Devices was called for a pod, and tells whether it is certain which
// devices the pod has.
func (a *Assignments) want(pod config.PodName) (sure bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, ok := a.wanted[pod]; !ok {
		a.wanted[pod] = a.now()
	}
	return a.sure(pod)
}

func (a *Assignments) sure(pod config.PodName) bool {
	return len(a.pods[pod].ids) > 0 || !a.answered.IsZero() && !a.answered.Before(a.wanted[pod])
}

// due tells whether kubelet is to be asked now because of a pod, and how long to wait for
// the answer.
func (a *Assignments) due(pod config.PodName) (timeout time.Duration, due bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	every, timeout, now := freshFor, askTimeout, a.now()
	switch isNew := now.Sub(a.wanted[pod]) < newFor; {
	case !a.sure(pod) && isNew:
		every, timeout = askSoon, askTimeoutNew
	case a.err != nil:
		every = askAgain
	}
	return timeout, a.asked.Before(a.wanted[pod]) || now.Sub(a.asked) >= every
}

// heard takes over the answer, or the error, of a question that began at began.
func (a *Assignments) heard(began time.Time, pods map[config.PodName]assignment, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.now()
	switch {
	case err == nil && a.err != nil:
		a.log.Info("kubelet answers again which devices pods have")
	case err != nil && (a.err == nil || now.Sub(a.mentions) >= complainEvery):
		a.mentions = now
		a.log.Warn("kubelet does not answer which devices pods have; the last answer is used", "err", err)
	}
	if a.asked, a.err = now, err; err != nil {
		return
	}
	a.answered = began
	a.take(pods)
	maps.DeleteFunc(a.wanted, func(pod config.PodName, since time.Time) bool {
		_, ok := a.pods[pod]
		return !ok && began.Sub(since) >= forgetAfter
	})
}

// take takes over an answer. A pod keeps its devices as long as it lives. But the answer
// may lack a pod or its devices because kubelet has just started; and a pod without devices
// may be a new one with the name of an earlier pod. So a pod loses its devices only after
// kubelet has answered for forgetAfter that it has none.
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

// keep records which devices pods have, if that changed.
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
	// The record is needed only if an agent starts while kubelet is away. After an error, such
	// as that of a full disk, it is written with the next answer.
	if err := writeRecord(a.record, now); err != nil {
		if a.unkept.IsZero() || a.asked.Sub(a.unkept) >= complainEvery {
			a.unkept = a.asked
			a.log.Warn("record of pods' devices not written, tried again; an agent that starts while kubelet is away would not know them", "err", err)
		}
		return
	}
	a.recorded, a.unkept = now, time.Time{}
}

// ask asks kubelet for the devices of all pods. There is also a call for one pod in the pod
// resources API, but not in every kubelet, and it would be one call for each pod.
func (a *Assignments) ask(timeout time.Duration) (map[config.PodName]assignment, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	// Each call, of which there are few, has a new connection, so that a restart of kubelet
	// does not matter.
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

// devices are the IDs of a pod's devices, without slots, each once.
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

// counts says whether the devices of a resource count as RDMA devices of pods.
func (a *Assignments) counts(resource string) bool {
	return slices.ContainsFunc(a.others, func(o string) bool {
		vendor, all := strings.CutSuffix(o, "*")
		return all && strings.HasPrefix(resource, vendor) || o == resource
	})
}

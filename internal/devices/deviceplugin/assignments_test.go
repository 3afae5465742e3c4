// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/smcr-io/kube-smcr/internal/config"
)

// devicesOf is what kubelet answers: one entry for each NUMA node.
func devicesOf(resource string, ids ...string) *podresources.ContainerDevices {
	return &podresources.ContainerDevices{ResourceName: resource, DeviceIds: ids}
}

func TestAssignments(t *testing.T) {
	k := newKubelet(t)
	k.pods = []*podresources.PodResources{
		{Namespace: "shop", Name: "none", Containers: []*podresources.ContainerResources{{Name: "c"}}},
		{Namespace: "shop", Name: "slots", Containers: []*podresources.ContainerResources{
			{Name: "c", Devices: []*podresources.ContainerDevices{devicesOf(ResourceShared, "soft1/4"), devicesOf(ResourceShared, "soft0/9")}},
			{Name: "d", Devices: []*podresources.ContainerDevices{devicesOf(ResourceShared, "soft1/5"), devicesOf("vendor.com/gpu", "0000:07:00.0")}},
		}},
		{Namespace: "bank", Name: "slots"},
		{Namespace: "bank", Name: "vfs", Containers: []*podresources.ContainerResources{{Name: "c", Devices: []*podresources.ContainerDevices{
			devicesOf(ResourceVF, "0000:01:10.2"), devicesOf("intel.com/sriov_rdma", "0000:3B:02.1"), devicesOf("mellanox.com/mlnx", "0000:82:00.4", "mlx5_core.sf.2"),
		}}}},
	}
	a := NewAssignments(t.TempDir(), k.socket(), []string{"intel.com/*", "mellanox.com/mlnx"}, slog.New(slog.DiscardHandler))
	now := time.Unix(0, 0)
	a.now = func() time.Time { return now }
	pod := func(ns, name string) config.PodName { return config.PodName{Namespace: ns, Name: name} }
	if got := a.Devices(pod("shop", "slots")); got != nil {
		t.Errorf("Devices without kubelet = %v", got)
	}
	k.start()
	if got := a.Devices(pod("shop", "slots")); got != nil {
		t.Errorf("kubelet is asked again at once, and says %v", got)
	}
	now = now.Add(askAgain)
	tests := []struct {
		pod  config.PodName
		want []string
	}{
		{pod("shop", "slots"), []string{"soft0", "soft1"}},
		{pod("bank", "slots"), nil},
		{pod("shop", "none"), nil},
		{pod("bank", "vfs"), []string{"0000:01:10.2", "0000:3b:02.1", "0000:82:00.4"}},
		{pod("shop", "unknown"), nil},
	}
	for _, tt := range tests {
		if diff := cmp.Diff(tt.want, a.Devices(tt.pod)); diff != "" {
			t.Errorf("Devices(%v) (-want +got):\n%s", tt.pod, diff)
		}
	}
	if asked := k.asked(); asked != 1 {
		t.Errorf("kubelet was asked %d times", asked)
	}
	late := pod("shop", "late")
	k.mu.Lock()
	k.pods = append(k.pods, &podresources.PodResources{Namespace: late.Namespace, Name: late.Name, Containers: []*podresources.ContainerResources{
		{Devices: []*podresources.ContainerDevices{devicesOf(ResourceShared, "soft0/1")}},
	}})
	k.mu.Unlock()
	now = now.Add(askSoon)
	if got := a.Devices(late); len(got) != 1 {
		t.Errorf("a pod that is new has %v", got)
	}

	// Kubelet lists a pod that it admits before the pod has its devices.
	admitted, given := pod("shop", "admitted"), []*podresources.ContainerResources{
		{Devices: []*podresources.ContainerDevices{devicesOf(ResourceShared, "soft0/2")}},
	}
	k.mu.Lock()
	k.pods = append(k.pods, &podresources.PodResources{Namespace: admitted.Namespace, Name: admitted.Name})
	k.mu.Unlock()
	now = now.Add(freshFor)
	a.Devices(late)
	k.mu.Lock()
	k.pods[len(k.pods)-1] = &podresources.PodResources{Namespace: admitted.Namespace, Name: admitted.Name, Containers: given}
	k.mu.Unlock()
	now = now.Add(askSoon / 2)
	if got := a.Devices(admitted); len(got) != 1 {
		t.Errorf("a pod that was listed before it got its devices has %v", got)
	}

	slots, vfs := pod("shop", "slots"), pod("bank", "vfs")
	all := k.pods
	answers := func(pods ...*podresources.PodResources) {
		k.mu.Lock()
		k.pods = pods
		k.mu.Unlock()
		now = now.Add(freshFor)
		a.Devices(slots)
	}
	answers(&podresources.PodResources{Namespace: slots.Namespace, Name: slots.Name}) // kubelet has just started
	if x, y := len(a.Devices(slots)), len(a.Devices(vfs)); x != 2 || y != 3 {
		t.Errorf("pods have lost devices to a kubelet that starts: %d of 2, %d of 3", 2-x, 3-y)
	}
	answers(all...)
	now = now.Add(forgetAfter)
	answers()
	if got := a.Devices(slots); len(got) != 2 {
		t.Errorf("the time began before the devices were gone: %v", got)
	}
	again := &podresources.PodResources{Namespace: slots.Namespace, Name: slots.Name, Containers: []*podresources.ContainerResources{
		{Devices: []*podresources.ContainerDevices{devicesOf(ResourceShared, "soft3/1")}},
	}}
	answers(again)
	if diff := cmp.Diff([]string{"soft3"}, a.Devices(slots)); diff != "" {
		t.Errorf("another pod of the same name (-want +got):\n%s", diff)
	}
	now = now.Add(forgetAfter)
	answers(again)
	if got := a.Devices(vfs); got != nil {
		t.Errorf("a pod that is gone has %v", got)
	}
	k.stop()
	now = now.Add(freshFor)
	if got := a.Devices(slots); len(got) != 1 {
		t.Errorf("while kubelet is away a pod has %v", got)
	}
	early := pod("shop", "early")
	if got := a.Devices(early); got != nil {
		t.Errorf("while kubelet is away a new pod has %v", got)
	}
	k.mu.Lock()
	k.pods = append(k.pods, &podresources.PodResources{Namespace: early.Namespace, Name: early.Name, Containers: given})
	k.mu.Unlock()
	k.start()
	now = now.Add(askSoon)
	if got := a.Devices(early); len(got) != 1 {
		t.Errorf("after one question without an answer a new pod has %v", got)
	}
}

// TestAssignments_kubeletAway: an agent that starts while kubelet is away knows from
// the record what pods have.
func TestAssignments_kubeletAway(t *testing.T) {
	dir := t.TempDir()
	pod, none := config.PodName{Namespace: "shop", Name: "cart-0"}, config.PodName{Namespace: "shop", Name: "none"}
	k := newKubelet(t)
	k.pods = []*podresources.PodResources{
		{Namespace: pod.Namespace, Name: pod.Name, Containers: []*podresources.ContainerResources{
			{Devices: []*podresources.ContainerDevices{devicesOf(ResourceShared, "soft1/4", "soft0/9")}},
		}},
		{Namespace: none.Namespace, Name: none.Name},
	}
	agent := func() *Assignments { return NewAssignments(dir, k.socket(), nil, slog.New(slog.DiscardHandler)) }
	want := []string{"soft0", "soft1"}
	check := func(what string, a *Assignments, want []string) {
		t.Helper()
		if diff := cmp.Diff(want, a.Devices(pod)); diff != "" {
			t.Errorf("%s (-want +got)\n%s", what, diff)
		}
		if got := a.Devices(none); got != nil {
			t.Errorf("%s: a pod without devices has %v", what, got)
		}
	}
	check("no kubelet, no record", agent(), nil)
	k.start()
	check("kubelet", agent(), want)
	k.stop()
	check("no kubelet", agent(), want)

	k.mu.Lock()
	k.pods = nil
	k.mu.Unlock()
	k.start()
	a := agent()
	now := time.Now()
	a.now = func() time.Time { return now }
	check("kubelet starts", a, want)
	now = now.Add(forgetAfter)
	check("the pod is gone", a, nil)
	k.stop()
	check("no kubelet, the pod is gone", agent(), nil)

	name := filepath.Join(recordOf(dir).Path, recordName)
	for text, want := range map[string][]string{
		`{"schemaVersion": 1, "pods": [{"namespace": "shop", "name": "cart-0", "devices": ["soft7"]}]}`: {"soft7"},
		`{"schemaVersion": 2, "pods": [{"namespace": "shop", "name": "cart-0", "devices": ["soft7"]}]}`: nil,
		`{"schemaVersion": 1, "pods": [`: nil,
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		check(text, agent(), want)
	}
	if err := ForgetAssignments(dir); err != nil {
		t.Error(err)
	}
	check("forgotten", agent(), nil)
}

// TestAssignments_recordLater: a record that could not be written, as on a full disk, is written
// when that works again, although kubelet's answer is the same.
func TestAssignments_recordLater(t *testing.T) {
	dir := t.TempDir()
	pod := config.PodName{Namespace: "shop", Name: "cart-0"}
	k := newKubelet(t)
	k.pods = []*podresources.PodResources{{Namespace: pod.Namespace, Name: pod.Name, Containers: []*podresources.ContainerResources{
		{Devices: []*podresources.ContainerDevices{devicesOf(ResourceShared, "soft0/9")}},
	}}}
	k.start()
	inTheWay := recordOf(dir).Path // no directory can be made there
	if err := os.WriteFile(inTheWay, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	a := NewAssignments(dir, k.socket(), nil, slog.New(slog.NewTextHandler(&said, nil)))
	now := time.Unix(0, 0)
	a.now = func() time.Time { return now }
	for range 3 {
		a.Devices(pod)
		now = now.Add(freshFor)
	}
	if n := strings.Count(said.String(), "not written"); n != 1 {
		t.Errorf("logged %d times, want once:\n%s", n, said.String())
	}
	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	a.Devices(pod)
	k.stop()
	next := NewAssignments(dir, k.socket(), nil, slog.New(slog.DiscardHandler))
	if diff := cmp.Diff([]string{"soft0"}, next.Devices(pod)); diff != "" {
		t.Errorf("the next agent, without kubelet (-want +got)\n%s", diff)
	}
}

// TestNewAssignments_stale: an agent removes what one that was killed while it wrote left.
func TestNewAssignments_stale(t *testing.T) {
	dir := t.TempDir()
	if err := recordOf(dir).Make(); err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(recordOf(dir).Path, ".tmp-1")
	if err := os.WriteFile(left, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	NewAssignments(dir, filepath.Join(dir, "none"), nil, slog.New(slog.DiscardHandler))
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file of a killed agent: %v", err)
	}
}

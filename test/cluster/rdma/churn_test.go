// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"cmp"
	"fmt"
	"os"
	"strconv"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/internal/devices/deviceplugin"
)

// churnEnv is how many pods with a VF come and go, if not a hundred: they take some nine seconds each.
const churnEnv = "KUBE_SMCR_CHURN_PODS"

// churned is how many of them come by each way.
func (s *suite) churned() int32 {
	s.Helper()
	n, err := strconv.ParseInt(cmp.Or(os.Getenv(churnEnv), "100"), 10, 32)
	if err != nil || n < 2 {
		s.Fatalf("%s: want a number from 2 on: %v", churnEnv, err)
	}
	return int32(n / 2)
}

// churn: pods with VFs come and go, more than there are VFs, some of them by force. Each has a VF that works, and nothing of them is left.
func churn(s *suite) {
	ns := s.namespace("test-churn")
	defer s.endNamespaces(ns)
	s.vfTemplate(ns, "vf", 0)
	s.vfTemplate(ns, "other", 1)
	again := s.unchanged()
	for _, way := range []struct {
		name   string
		object func(name string, args ...string) *corev1.Pod
		server *corev1.Pod
		vfs    int32 // that are left on the guests beside that of the server
	}{
		{
			"plugin", func(name string, args ...string) *corev1.Pod {
				return asking(ns, name, deviceplugin.ResourceVF, 1, args...)
			},
			asking(ns, "server", deviceplugin.ResourceVF, 1), 2*vfsPerNode - 1,
		},
		{
			"claims", func(name string, args ...string) *corev1.Pod { return claiming(ns, name, "vf", args...) },
			claiming(ns, "server", "other"), 2 * vfsPerPF,
		},
	} {
		server := s.run(on(way.server, s.hw[0]), s.hw[0].Node)
		server, _ = s.withVF(s.hw[0], server, 1)
		empty := s.unchanged()
		began := time.Now()
		s.comeAndGo(ns, way.name, way.object("", "once", server.address()), way.vfs)
		s.Logf("%d pods by %s came and went in %v", s.churned(), way.name, time.Since(began).Round(time.Second))
		empty()
		s.endPods(ns)
		again()
	}
}

// comeAndGo runs half of the churned pods to their end, as many at a time as have a VF and two that wait for one. While
// they run some are deleted by force, and made again.
func (s *suite) comeAndGo(ns, name string, o *corev1.Pod, vfs int32) {
	s.Helper()
	completions, parallelism, backoff := s.churned(), vfs+2, 2*s.churned()
	o.Spec.RestartPolicy = corev1.RestartPolicyNever
	job := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: batchv1.JobSpec{
			Completions: &completions, Parallelism: &parallelism, BackoffLimit: &backoff,
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"churn": name}}, Spec: o.Spec},
		},
	}
	s.must(s.p.Client.Create(s.Context(), job))
	forced := 0
	s.within(30*time.Minute, "the end of the pods of "+name, func() error {
		if err := s.get(ns, name, job); err != nil {
			return err
		}
		if job.Status.Succeeded >= completions {
			return nil
		}
		if forced < 5 && int(job.Status.Succeeded) > 8*forced {
			forced += s.forceOne(ns, name)
		}
		return fmt.Errorf("%d of them succeeded, %d failed", job.Status.Succeeded, job.Status.Failed)
	})
	if forced == 0 {
		s.Errorf("no pod of %s was deleted by force", name)
	}
	if int(job.Status.Failed) > forced {
		s.Errorf("%d pods of %s failed; %d were deleted by force", job.Status.Failed, name, forced)
	}
	out, err := s.c.Kubectl(s.Context(), "delete", "job", "-n", ns, name, "--cascade=foreground", "--timeout="+soon.String())
	if err != nil {
		s.Fatal(out, err)
	}
}

// forceOne deletes a pod that has a node without waiting for its node, and returns how many: one, or none if there is none.
func (s *suite) forceOne(ns, name string) int {
	s.Helper()
	var list corev1.PodList
	s.must(s.p.Client.List(s.Context(), &list, client.InNamespace(ns), client.MatchingLabels{"churn": name}))
	for _, p := range list.Items {
		if p.Spec.NodeName != "" && p.Status.Phase == corev1.PodPending {
			s.must(client.IgnoreNotFound(s.p.Client.Delete(s.Context(), &p, client.GracePeriodSeconds(0))))
			return 1
		}
	}
	return 0
}

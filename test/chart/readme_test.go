// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"os"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"

	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
)

// TestReadmeInstalls: what README.md says to pack is the image that helm install, as it
// stands there, installs.
func TestReadmeInstalls(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	ref, err := image.ChartRef(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := find[*appsv1.DaemonSet](t, template(t), "-agent").Spec.Template.Spec.Containers[0].Image; got != ref {
		t.Errorf("the chart installs %s, make image packs %s", got, ref)
	}
	file := "out/images/" + strings.ReplaceAll(ref[strings.LastIndexByte(ref, '/')+1:], ":", "-") + ".tar"
	for _, want := range []string{"make image", "kind load image-archive " + file, "helm install kube-smcr charts/kube-smcr --namespace kube-smcr --create-namespace"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("README.md does not say %q", want)
		}
	}
}

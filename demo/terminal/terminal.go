// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/demo/transcript"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// A Terminal is owned by one goroutine.
type Terminal struct {
	*transcript.Transcript
	P *product.Product // on the cluster; nil until there is one
	// Patience is how long Eventually waits.
	Patience time.Duration
}

// Kubectl runs a command, shows it with its output, and returns that.
func (t *Terminal) Kubectl(ctx context.Context, args ...string) (string, error) {
	out, err := t.P.Lab.Kubectl(ctx, args...)
	t.shown("kubectl", args, out)
	return out, err
}

// SMCR is Kubectl for the plugin "kubectl smcr".
func (t *Terminal) SMCR(ctx context.Context, args ...string) (string, error) {
	out, err := t.P.KubectlSMCR(ctx, args...)
	t.shown("kubectl smcr", args, out)
	return out, err
}

func (t *Terminal) shown(program string, args []string, out string) {
	words := []string{program}
	for _, a := range args {
		if strings.ContainsAny(a, " {}*'\"$") {
			a = "'" + a + "'"
		}
		words = append(words, a)
	}
	fmt.Fprintf(t.Out, "$ %s\n%s\n", strings.Join(words, " "), strings.TrimRight(out, "\n")+"\n")
}

// Apply shows and applies objects.
func (t *Terminal) Apply(ctx context.Context, objects string) error {
	fmt.Fprintf(t.Out, "$ kubectl apply -f - <<EOF\n%sEOF\n\n", objects)
	return t.P.Lab.Apply(ctx, objects)
}

// Eventually waits for a condition and notes it as a check, with what the condition returned.
func (t *Terminal) Eventually(ctx context.Context, what string, condition func() (string, error)) {
	began := time.Now()
	var detail string
	err := product.Eventually(ctx, what, t.Patience, func() error {
		var err error
		detail, err = condition()
		return err
	})
	if err != nil {
		t.Check(what, false, "%v", err)
		return
	}
	t.Check(what, true, "after %.1f s. %s", time.Since(began).Seconds(), detail)
}

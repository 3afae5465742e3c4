// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"os"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestConsole(t *testing.T) {
	for _, c := range []struct {
		name, text string
		complaints []string
		crashed    bool
	}{
		{name: "quiet", text: "[    0.02] ..MP-BIOS bug: 8254 timer not connected to IO-APIC\r\n"},
		{name: "hung task", text: "[ 62.1] INFO: task smc_wq:33 blocked for more than 40 seconds.\r\n", complaints: []string{"g0: [ 62.1] INFO: task smc_wq:33 blocked for more than 40 seconds."}},
		{name: "warning", text: "a\nWARNING: CPU: 0 PID: 1 at x.c:3 f+0x1\nb\n", complaints: []string{"g0: WARNING: CPU: 0 PID: 1 at x.c:3 f+0x1"}},
		{name: "stall", text: "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:\n", complaints: []string{"g0: rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:"}},
		{name: "incomplete line", text: "BUG: unable to handle"},
		{
			name: "oops", text: "BUG: unable to handle page fault\nOops: 0002\nKernel panic - not syncing: Fatal exception\n", crashed: true,
			complaints: []string{"g0: BUG: unable to handle page fault", "g0: Oops: 0002"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLab(Config{Guests: 1}, t.TempDir())
			g := l.Guest(0)
			if err := os.MkdirAll(g.dir(), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(g.consoleFile(), []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.complaints, l.Complaints()); diff != "" {
				t.Errorf("complaints (-want +got):\n%s", diff)
			}
			if crashed := g.failure() != nil; crashed != c.crashed {
				t.Errorf("crashed: %v, want %v", crashed, c.crashed)
			}
			l.ForgiveComplaints(regexp.MustCompile(`.`))
			if got := l.Complaints(); len(got) > 0 {
				t.Errorf("after forgiving all: %q", got)
			}
		})
	}
}

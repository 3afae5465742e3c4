// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/preflight"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
)

// faults: a node that lacks something says what, first of all, by trying.
func faults(t *testing.T, l *lab.Lab) {
	if _, err := l.Build(t.Context(), module+"/cmd/smcrctl", lab.BuildOptions{}); err != nil {
		t.Fatal(err)
	}
	g := l.Guest(0)
	for _, tt := range []struct {
		name string
		// spoil takes something away, and mend gives it back.
		spoil, mend string
		// by is the beginning of the command line of who tries.
		by   string
		want kernelpath.Missing // "": nothing
	}{
		{name: "nothing"},
		{name: "no BPF file system", by: "unshare --mount bash -c 'umount /sys/fs/bpf && exec \"$@\"' sh", want: kernelpath.NoPins},
		{name: "no types of the kernel", by: "unshare --mount bash -c 'mount --bind /dev/null /sys/kernel/btf/vmlinux && exec \"$@\"' sh", want: kernelpath.NoBTF},
		{name: "no rights", by: "setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all --bounding-set=-all", want: kernelpath.NoRights},
		{
			name: "no module", spoil: "rmmod smc_diag smc; mkdir -p /etc/modprobe.d; echo install smc /bin/false >/etc/modprobe.d/faults.conf",
			mend: "rm /etc/modprobe.d/faults.conf; modprobe -a smc smc_diag", want: kernelpath.NoSMC,
		},
		{name: "no device", spoil: "rdma link delete rxe0", mend: "rdma link add rxe0 type rxe netdev eth0", want: kernelpath.NoDevice},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sh := func(script string) string {
				t.Helper()
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				out, err := g.Shell(ctx, script)
				if err != nil {
					t.Fatalf("%s: %v\n%s", script, err, out)
				}
				return out
			}
			if tt.spoil != "" {
				sh(tt.spoil)
				defer func() { sh(tt.mend) }()
			}
			const fails = 4 // what preflight ends with if something that an agent needs is missing
			var r preflight.Report
			text := sh(fmt.Sprintf("%s smcrctl preflight -o json || test $? = %d", tt.by, fails))
			if err := json.Unmarshal([]byte(text), &r); err != nil {
				t.Fatalf("%v: %s", err, text)
			}
			i := slices.IndexFunc(r.Checks, func(c preflight.Check) bool { return c.Name == "kernelPath" })
			if i < 0 {
				t.Fatalf("no such check: %s", text)
			}
			c := r.Checks[i]
			if c.Reason != string(tt.want) || (c.Result == preflight.OK) != (tt.want == "") || !strings.Contains(c.Advice, tt.want.Need()) {
				t.Errorf("%+v, want %q", c, tt.want)
			}
		})
	}
	// The module has forgotten its settings.
	if err := drive.SetUpSMC(t.Context(), g, 0); err != nil {
		t.Fatal(err)
	}
}

// deviceGone: a device that is taken from a node ends the connections on it, and costs no new ones: they are plain
// TCP, which the kernel says, and on SMC-R when the device is back. The pod stays attached.
func (b *bed) deviceGone(t *testing.T) {
	before := b.client.counters(t)
	b.hold(t, "lost", fmt.Sprintf("socat PIPE TCP4:%s:%d", b.server.addr, selected))
	b.client.eventually(t, "a connection is on SMC-R", func() error {
		if d := b.client.counters(t).Sub(before); d.ClientV2 != 1 {
			return fmt.Errorf("%+v", d)
		}
		return nil
	})
	b.client.sh(t, "rdma link delete rxe0")
	b.client.eventually(t, "the connection has ended", func() error {
		_, err := b.client.Shell(t.Context(), "test -s /tmp/ended-lost")
		return err
	})
	before = b.client.counters(t)
	b.expect(t, map[int]bool{selected: false})
	noDevice := smcnl.Fallback{Side: smcnl.Client, Reason: clc.ReasonNoDev}
	if d := b.client.counters(t).Sub(before); d.Fallbacks[noDevice] != conns {
		t.Errorf("without the device: %+v", d)
	}
	b.client.awaitPod(t, "the pod is attached", func(a agentapi.Attachment) bool {
		return a.State == agentapi.StateReady && a.Datapath == "Kernel"
	})
	b.client.sh(t, "rdma link add rxe0 type rxe netdev eth0")
	b.firstContact(t)
	b.expect(t, map[int]bool{selected: true})
}

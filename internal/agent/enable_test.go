// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// TestRun_stays: where the node lacks something the agent says what, diverts
// nothing, refuses what must not be plain TCP, and ends once it is there.
func TestRun_stays(t *testing.T) {
	tests := []struct {
		name  string
		spoil func(b *bench, gone *atomic.Bool)
		code  agentapi.Code
		want  string
	}{
		{"no device", func(b *bench, gone *atomic.Bool) {
			open := b.cfg.openDevice
			b.cfg.Node.Devices = []config.Device{{Interface: "eth9"}}
			b.cfg.openDevice = func(name string, d config.Device, share bool) (rdma.Device, func() error, error) {
				if gone.Load() {
					return openDevice(b.cfg.Log, b.cfg.Node.DataDir, name, d, share)
				}
				return open(name, d, share)
			}
		}, "NOSMCDEV", "interface eth9 is not there"},
		{"old kernel", func(b *bench, gone *atomic.Bool) {
			b.cfg.preflight = func() error {
				if gone.Load() {
					return &linux.FeatureError{Feature: "nftables", Remedy: "load the module", Err: errors.New("not there")}
				}
				return nil
			}
		}, agentapi.CodeNoOption, "nftables: not there: load the module"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, "", "policies:\n- {name: p, pods: {names: [a]}}\n- {name: r, mode: Required, pods: {names: [required]}}\n")
			var gone atomic.Bool
			gone.Store(true)
			tt.spoil(b, &gone)
			b.cfg.Stay, b.cfg.ableEvery = true, 20*time.Millisecond
			p := b.attach("a", 1)
			required := b.attach("required", 2)
			required.dst = b.server()
			b.start()
			s := b.status()
			if s.Accelerating || s.UnableCode != tt.code || !strings.Contains(s.Unable, tt.want) {
				t.Errorf("status %+v", s)
			}
			if a := b.attachment("a"); a.State != agentapi.StateIdle || p.redir != nil || !strings.Contains(a.Detail, tt.want) {
				t.Errorf("attachment %+v", a)
			}
			b.dialReset(required, 0)

			gone.Store(false)
			select {
			case err := <-b.done:
				b.done <- err
				if err != nil {
					t.Errorf("Run = %v", err)
				}
			case <-time.After(10 * time.Second):
				t.Fatal("the agent does not notice that what it lacked is there")
			}
		})
	}
}

// TestRun_staysWithOneDevice: a device that is missing does not keep the other
// from being used.
func TestRun_staysWithOneDevice(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.cfg.Stay = true
	b.cfg.Node.Devices = append(b.cfg.Node.Devices, config.Device{SoftAddress: netip.MustParseAddr("192.0.2.2")})
	open := b.cfg.openDevice
	b.cfg.openDevice = func(name string, d config.Device, share bool) (rdma.Device, func() error, error) {
		if name == "soft1" {
			return nil, nil, errors.New("not there")
		}
		return open(name, d, share)
	}
	b.attach("a", 1)
	b.start()
	s := b.status()
	if !s.Accelerating || len(s.Devices) != 2 || s.Devices[1].Port != rdma.PortDown.String() || !strings.Contains(strings.Join(s.Problems, " "), "node.devices[1], 192.0.2.2: not there") {
		t.Errorf("status %+v", s)
	}
}

func TestRun_withoutOption(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.cfg.openOption = func() (smcr.Option, func() error, error) { return nil, nil, errors.New("no BPF here") }
	p := b.attach("a", 1)
	b.start()
	s := b.status()
	if s.Accelerating || len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "no BPF here") {
		t.Errorf("status %+v", s)
	}
	if a := b.attachment("a"); a.State != agentapi.StateIdle || p.redir != nil {
		t.Errorf("something is diverted: %+v", a)
	}
	e := value(b.client.Explain(t.Context(), "test/a", "192.0.2.9:80"))(t)
	if e.Code != agentapi.CodeNoOption {
		t.Errorf("explanation %+v", e)
	}
}

// TestRun_withoutOptionRequired: a policy that requires SMC-R holds all the
// same.
func TestRun_withoutOptionRequired(t *testing.T) {
	b := newBench(t, "", "policies:\n- {name: p, mode: Required}\n")
	b.cfg.openOption = func() (smcr.Option, func() error, error) { return nil, nil, errors.New("no BPF here") }
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	b.dialReset(p, 0)
}

// options counts the TCP options that are open.
type options struct {
	opened, open int
	err, end     error // of opening and closing
}

func (o *options) get() (smcr.Option, func() error, error) {
	if o.err != nil {
		return nil, nil, o.err
	}
	o.opened++
	o.open++
	return fakeOption{}, func() error {
		o.open--
		return o.end
	}, nil
}

// TestEnable: what an agent makes of what the node lacks. A missing option is never an error, and of
// several reasons the first one counts.
func TestEnable(t *testing.T) {
	noFeature, noDevice, noBPF := errors.New("no nftables"), errors.New("no such device"), errors.New("no BPF here")
	const noOption = "the SMC-R TCP option cannot be written: no BPF here"
	for _, tt := range []struct {
		name              string
		stay              bool
		preflight, device error
		option            error
		rdma              string // the device is one of the kernel

		err    string
		unable unable
	}{
		{name: "all there"},
		{name: "all there, stay", stay: true},
		{name: "feature", preflight: noFeature, err: "this node cannot run the agent: no nftables"},
		{name: "feature, stay", stay: true, preflight: noFeature, unable: unable{"this node cannot run the agent: no nftables", agentapi.CodeNoOption}},
		{name: "device", device: noDevice, err: "open RDMA device node.devices[0], 192.0.2.1: no such device"},
		{name: "software device, stay", stay: true, device: noDevice, unable: unable{"open RDMA device node.devices[0], 192.0.2.1: no such device", "NOSMCDEV"}},
		{name: "device of the kernel, stay", stay: true, device: noDevice, rdma: "rxe0"}, // used as soon as it appears
		{name: "option", option: noBPF, unable: unable{noOption, agentapi.CodeNoOption}},
		{name: "option, stay", stay: true, option: noBPF, unable: unable{noOption, agentapi.CodeNoOption}},
		{name: "feature before device", stay: true, preflight: noFeature, device: noDevice, option: noBPF, unable: unable{"this node cannot run the agent: no nftables", agentapi.CodeNoOption}},
		{name: "device before option", stay: true, device: noDevice, option: noBPF, unable: unable{"open RDMA device node.devices[0], 192.0.2.1: no such device", "NOSMCDEV"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, "", preferAll)
			b.cfg.Stay = tt.stay
			if tt.rdma != "" {
				b.cfg.Node.Devices = []config.Device{{RDMA: tt.rdma}}
			}
			o := options{err: tt.option}
			b.cfg.openOption = o.get
			b.cfg.preflight = func() error { return tt.preflight }
			if tt.device != nil {
				b.cfg.openDevice = func(string, config.Device, bool) (rdma.Device, func() error, error) { return nil, nil, tt.device }
			}
			a := newBare(t, b).a
			closeOption, err := a.enable(t.Context())
			if tt.err != "" {
				if err == nil || err.Error() != tt.err || closeOption != nil || o.opened > 0 {
					t.Errorf("enable = %v, option opened %d times, want %q", err, o.opened, tt.err)
				}
				return
			}
			must(t, err)
			able := tt.unable.code == ""
			if a.unable != tt.unable || (a.option != nil) != able || (o.open == 1) != able {
				t.Errorf("unable %+v, option %v of which %d are open; want %+v", a.unable, a.option, o.open, tt.unable)
			}
			if logged := strings.Contains(b.log.String(), "everything is plain TCP"); logged == able {
				t.Errorf("in the log: %t", logged)
			}
			must(t, closeOption())
			if o.open != 0 {
				t.Errorf("%d options are still open", o.open)
			}
		})
	}
}

// TestAble: an agent looks whether all is there, and leaves nothing open.
func TestAble(t *testing.T) {
	missing := errors.New("not there")
	for _, tt := range []struct {
		name   string
		spoil  func(b *bench, o *options)
		device error // while the agent looks; it was missing before
		want   bool
	}{
		{"all there", func(*bench, *options) {}, nil, true},
		{"device", func(*bench, *options) {}, missing, false},
		{"no device wanted", func(b *bench, _ *options) { b.cfg.Node.Devices = nil }, missing, true},
		{"feature", func(b *bench, _ *options) { b.cfg.preflight = func() error { return missing } }, nil, false},
		{"option", func(_ *bench, o *options) { o.err = missing }, nil, false},
		{"option does not close", func(_ *bench, o *options) { o.end = missing }, nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, "", preferAll)
			b.cfg.Stay = true
			var o options
			b.cfg.openOption = o.get
			err, open := missing, 0
			b.cfg.openDevice = func(string, config.Device, bool) (rdma.Device, func() error, error) {
				if err != nil {
					return nil, nil, err
				}
				open++
				return fakeDevice{}, func() error { open--; return nil }, nil
			}
			tt.spoil(b, &o)
			bare := newBare(t, b)
			bare.openDevices()
			err = tt.device
			if got := bare.a.able(); got != tt.want {
				t.Errorf("able = %t", got)
			}
			if o.open != 0 || open != 0 {
				t.Errorf("%d options and %d devices are still open", o.open, open)
			}
		})
	}
}

// TestAwaitAble: an agent looks every ableEvery, until what was missing is there or the agent ends.
func TestAwaitAble(t *testing.T) {
	for _, tt := range []struct {
		name string
		upTo time.Duration // when the agent ends
		want bool
		took time.Duration
	}{
		{"comes", time.Hour, true, 3 * ableEvery},
		{"the agent ends", 5 * ableEvery / 2, false, 5 * ableEvery / 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newAbleBare(t, "", preferAll)
				begin := time.Now()
				b.a.cfg.preflight = func() error {
					if time.Since(begin) <= 2*ableEvery {
						return errors.New("not there")
					}
					return nil
				}
				ctx, cancel := context.WithTimeout(t.Context(), tt.upTo)
				defer cancel()
				if got := b.a.awaitAble(ctx); got != tt.want || time.Since(begin) != tt.took {
					t.Errorf("awaitAble = %t after %v, want %t after %v", got, time.Since(begin), tt.want, tt.took)
				}
			})
		})
	}
}

// TestUnableWith: which reason is given for a set of devices, none of which can be used.
func TestUnableWith(t *testing.T) {
	// missing are the names of the node's devices that cannot be opened.
	begin := func(t *testing.T, missing string, devices ...string) *bare {
		t.Helper()
		b, _ := hardwareBench(t, devices...)
		b.cfg.openDevice = func(name string, _ config.Device, _ bool) (rdma.Device, func() error, error) {
			if strings.Contains(missing, name) {
				return nil, nil, errors.New(name + " is not there")
			}
			return fakeDevice{}, func() error { return nil }, nil
		}
		b.cfg.openOwn = func(d *rnics.Own, _ rnics.Namespace) (rdma.Device, func() error, error) {
			if strings.Contains(missing, d.ID) {
				return nil, nil, errors.New(d.ID + " is not there")
			}
			return fakeDevice{}, func() error { return nil }, nil
		}
		bare := newBare(t, b)
		bare.openDevices()
		return bare
	}
	wantUnable := func(t *testing.T, got unable, code agentapi.Code, why string) {
		t.Helper()
		if got.code != code || (why == "") != (got.why == "") || !strings.Contains(got.why, why) {
			t.Errorf("unable %+v, want %q (%s)", got, code, why)
		}
	}
	t.Run("node", func(t *testing.T) {
		for _, tt := range []struct {
			name, missing string
			devices       []string
			code          agentapi.Code
			why           string
		}{
			{"all open", "", []string{"rxe0", "rxe1"}, "", ""},
			{"first missing", "rxe0", []string{"rxe0", "rxe1"}, "", ""},
			{"last missing", "rxe1", []string{"rxe0", "rxe1"}, "", ""},
			{"both missing", "rxe0 rxe1", []string{"rxe0", "rxe1"}, "NOSMCDEV", "rxe0 is not there"},
			{"none wanted", "", nil, "NOSMCDEV", "setting devices is empty"},
		} {
			b := begin(t, tt.missing, tt.devices...)
			t.Log(tt.name)
			wantUnable(t, b.a.unableWith(b.a.rnics.Node()), tt.code, tt.why)
			wantUnable(t, b.a.unableNode(), tt.code, tt.why)
		}
	})
	t.Run("pod", func(t *testing.T) {
		b := begin(t, "rxe0 vf1", "rxe0")
		set := b.a.rnics.NewSet(nil)
		defer func() { must(t, set.Release()) }()
		wantUnable(t, b.a.unableWith(set), agentapi.CodePodDevice, "no RDMA device is open")
		set.Update(t.Context(), nil, []rnics.Own{{Pod: "test/a", ID: "vf1"}})
		wantUnable(t, b.a.unableWith(set), agentapi.CodePodDevice, "vf1 is not there")
		wantUnable(t, b.a.unableNode(), "NOSMCDEV", "rxe0 is not there")
		set.Update(t.Context(), nil, []rnics.Own{{Pod: "test/a", ID: "vf1"}, {Pod: "test/a", ID: "vf2"}})
		wantUnable(t, b.a.unableWith(set), "", "")
		wantUnable(t, b.a.unableWith(b.a.rnics.Node()), "NOSMCDEV", "rxe0 is not there") // of other pods
		wantUnable(t, b.a.unableNode(), "", "")
	})
	t.Run("start", func(t *testing.T) {
		b := begin(t, "", "rxe0")
		b.a.unable = unable{"no BPF here", agentapi.CodeNoOption}
		wantUnable(t, b.a.unableWith(b.a.rnics.Node()), agentapi.CodeNoOption, "no BPF here")
		wantUnable(t, b.a.unableNode(), agentapi.CodeNoOption, "no BPF here")
	})
}

// TestRun_devicesReplaced: an agent whose container does not see the node's device files any more ends when a
// device is missing, and does not while it has all.
func TestRun_devicesReplaced(t *testing.T) {
	b, hs := hardwareBench(t, "rxe0")
	looked := make(chan struct{})
	var once sync.Once
	b.cfg.unlinked = func(dir string) bool {
		once.Do(func() { close(looked) })
		return dir == "/dev/infiniband"
	}
	b.attach("a", 1)
	b.start()
	<-time.After(3 * b.cfg.ableEvery)
	select {
	case <-looked:
		t.Error("the agent has its device, and looks for the directory of device files")
	case err := <-b.done:
		b.done <- err
		t.Fatalf("the agent ended though it has its device: %v", err)
	default:
	}
	hs[0].set(errUnplugged)[0].events <- rdma.AsyncEvent{Kind: rdma.EventDeviceFatal, Err: errUnplugged}
	select {
	case err := <-b.done:
		b.done <- err
	case <-time.After(10 * time.Second):
		t.Fatal("the agent does not end")
	}
}

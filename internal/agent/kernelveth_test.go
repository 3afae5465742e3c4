// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

func (s *fakeSMC) keep() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keeps++
	return s.keepErr
}

// What the configuration says of veths comes to the datapath, with the addresses that the network gave the pod, and a change of it, too.
func TestKernelPath_veth(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	b.attach("a", 1)
	b.start()
	cfg, _ := s.pod(1)
	want := []netip.Addr{}
	for _, p := range b.attachment("a").Addresses {
		want = append(want, p.Addr())
	}
	if len(want) == 0 || cfg.Veth || !slices.Equal(cfg.Addresses, want) {
		t.Errorf("%+v, want no veth, and addresses %v", cfg, want)
	}
	b.configure("  kernelPath: {veth: true}\n", kernelAll)
	b.reload <- struct{}{}
	b.sync()
	if cfg, _ := s.pod(1); !cfg.Veth || !slices.Equal(cfg.Addresses, want) {
		t.Errorf("%+v, want a veth, and addresses %v", cfg, want)
	}
}

// What veths need is looked after now and then, and what is wrong with it logged once.
func TestKernelPath_keeps(t *testing.T) {
	var log bytes.Buffer
	s := newFakeSMC()
	k := kernelPath{a: &agent{}, chooser: s}
	k.a.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	now := time.Now()
	for i, tt := range []struct {
		after time.Duration
		err   error
		keeps int
		log   string
	}{
		{keeps: 1},
		{after: leadEvery - 1, err: errors.New("no dummy"), keeps: 1},
		{after: 1, err: errors.New("no dummy"), keeps: 2, log: "no dummy"},
		{after: leadEvery, err: errors.New("no dummy"), keeps: 3},
		{after: leadEvery, keeps: 4},
		{after: leadEvery, err: errors.New("no dummy"), keeps: 5, log: "no dummy"},
	} {
		log.Reset()
		now, s.keepErr = now.Add(tt.after), tt.err
		k.keepLocked(now)
		if text := log.String(); s.keeps != tt.keeps || (text != "") != (tt.log != "") || !strings.Contains(text, tt.log) {
			t.Errorf("%d: asked %d times, want %d; log %q, want %q", i, s.keeps, tt.keeps, text, tt.log)
		}
	}
}

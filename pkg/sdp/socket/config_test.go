// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// What no message could tell, or no peer would accept, is refused before anything is sent.
func TestConfig_Validate(t *testing.T) {
	for name, c := range map[string]struct {
		cfg Config
		bad bool
	}{
		"least":                {cfg: Config{RecvBuffers: MinRecvBuffers, RecvBytes: bsdh.MinBuffer, SendBytes: bsdh.MinBuffer, MaxAdverts: 1, IRD: 1, ORD: 1}},
		"most":                 {cfg: Config{RecvBuffers: MaxRecvBuffers, RecvBytes: bsdh.MaxBytes, SendBytes: bsdh.MaxBytes, IRD: 65535, ORD: 65535}},
		"few receive buffers":  {cfg: Config{RecvBuffers: MinRecvBuffers - 1}, bad: true},
		"many receive buffers": {cfg: Config{RecvBuffers: MaxRecvBuffers + 1}, bad: true},
		"small ones":           {cfg: Config{RecvBytes: bsdh.MinBuffer - 1}, bad: true},
		"huge ones":            {cfg: Config{RecvBytes: bsdh.MaxBytes + 1}, bad: true},
		"small send buffers":   {cfg: Config{SendBytes: bsdh.MinBuffer - 1}, bad: true},
		"huge send buffers":    {cfg: Config{SendBytes: bsdh.MaxBytes + 1}, bad: true},
		"negative adverts":     {cfg: Config{MaxAdverts: -1}, bad: true},
		"many adverts":         {cfg: Config{MaxAdverts: MaxMaxAdverts + 1}, bad: true},
		"negative IRD":         {cfg: Config{IRD: -1}, bad: true},
		"IRD":                  {cfg: Config{IRD: 65536}, bad: true},
		"ORD":                  {cfg: Config{ORD: 65536}, bad: true},
	} {
		c.cfg.ZcopyBytes = NoZcopy
		if err := c.cfg.Validate(); errors.Is(err, ErrInvalid) != c.bad || (err != nil) != c.bad {
			t.Errorf("%s: %v", name, err)
		}
	}
	s, err := New(time.Unix(0, 0), Config{ZcopyBytes: NoZcopy})
	if err != nil {
		t.Fatal(err)
	}
	m := s.Poll(nil)[0].Message // what is not set is none of what a peer must refuse
	if err := m.CheckSetup(); err != nil {
		t.Error(err)
	}
}

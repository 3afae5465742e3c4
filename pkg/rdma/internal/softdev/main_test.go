// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// silentDevice is a provider whose wire takes everything and brings nothing.
type silentDevice struct{ *Device }

func (silentDevice) Name() string { return "silent" }

func (silentDevice) Attr() rdma.DeviceAttr {
	return rdma.DeviceAttr{
		Provider: "silent", MaxQP: MaxQP, MaxCQE: MaxCQE, MaxMRBytes: MaxMRBytes, MaxSGE: rocev2.MaxSGE,
		MaxSendWR: rocev2.MaxQueue, MaxRecvWR: rocev2.MaxQueue, MaxInline: MaxInline, WriteWithImm: true, RDMARead: true,
	}
}

func (silentDevice) Port() rdma.PortAttr   { return rdma.PortAttr{} }
func (silentDevice) GIDs() []rdma.GIDEntry { return nil }

// silentQP is a queue pair of RoCE.
type silentQP struct {
	QP
	m       *rocev2.QP
	refuse  error // what CheckModify says
	full    time.Time
	dropped int
	forgot  int
	pkts    [16]rocev2.TxPacket
}

func newSilentQP(c QPConfig) (Carrier, error) {
	m, err := rocev2.NewQP(rocev2.QPConfig{
		Num: c.Num, MaxSendWR: c.MaxSendWR, MaxRecvWR: c.MaxRecvWR, MaxSGE: c.MaxSGE, MaxInline: MaxInline, Memory: c.Memory,
	})
	return &silentQP{m: m}, err
}

func (q *silentQP) Machine() Machine              { return q.m }
func (q *silentQP) CheckModify(rdma.QPAttr) error { return q.refuse }
func (q *silentQP) Modified(rdma.QPAttr)          {}
func (q *silentQP) Retry() time.Time              { return q.full }
func (q *silentQP) SayLast(time.Time)             {}
func (q *silentQP) Drop()                         { q.dropped++ }
func (q *silentQP) ForgetMemory()                 { q.forgot++ }

func (q *silentQP) Transmit(now time.Time) {
	for q.m.PollTx(now, q.pkts[:]) > 0 {
	}
}

// silent is a context of a device whose wire is silent.
func silent(t *testing.T) *deviceContext {
	t.Helper()
	d := &silentDevice{}
	d.Device = New(Config{Device: d, NewQP: newSilentQP})
	t.Cleanup(func() { d.Close() })
	c, err := d.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // its memory
	return c.(*deviceContext)
}

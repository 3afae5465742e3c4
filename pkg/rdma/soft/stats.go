// SPDX-License-Identifier: Apache-2.0

package soft

import "sync/atomic"

const (
	rxPackets = iota
	rxBadICRC
	rxMalformed
	rxUnknownQP
	rxOtherDevice
	rxWrongSource
	numRxCounters
)

type counters struct {
	rx                           [numRxCounters]atomic.Uint64
	rxErrors                     atomic.Uint64
	txPackets, txWaits, txErrors atomic.Uint64
}

// Stats counts what happened to a device's packets. Those of the protocol are
// in [Device.QPStats]. What is dropped here no queue pair has seen.
type Stats struct {
	RxPackets     uint64
	RxBadICRC     uint64 // dropped: damaged on the way
	RxMalformed   uint64 // dropped: no RC packet
	RxUnknownQP   uint64 // dropped: late, or not for us
	RxOtherDevice uint64 // dropped: for the device that shares our address
	RxWrongSource uint64 // dropped: not from the queue pair's peer
	RxErrors      uint64 // receive calls that failed
	Receivers     int    // receiving sockets now, see [Config.Receivers]
	TxPackets     uint64
	TxWaits       uint64 // the wire was full
	TxErrors      uint64 // messages that the wire refused
}

// Stats returns the counters now.
func (d *Device) Stats() Stats {
	s := &d.stats
	receivers := 1
	if w, ok := d.wire.(Spreader); ok {
		receivers = w.Receivers()
	}
	return Stats{
		RxPackets:     s.rx[rxPackets].Load(),
		RxBadICRC:     s.rx[rxBadICRC].Load(),
		RxMalformed:   s.rx[rxMalformed].Load(),
		RxUnknownQP:   s.rx[rxUnknownQP].Load(),
		RxOtherDevice: s.rx[rxOtherDevice].Load(),
		RxWrongSource: s.rx[rxWrongSource].Load(),
		RxErrors:      s.rxErrors.Load(),
		Receivers:     receivers,
		TxPackets:     s.txPackets.Load(),
		TxWaits:       s.txWaits.Load(),
		TxErrors:      s.txErrors.Load(),
	}
}

// SPDX-License-Identifier: Apache-2.0

package softvi

// Pending is the number of connections whose calls are not answered.
func (d *Device) Pending() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.pending)
}

// Limits that tests exceed.
const (
	MaxPendingOfSource = maxPendingOfSource
	MaxBacklog         = maxBacklog
)

// SPDX-License-Identifier: Apache-2.0

package rocev2

// recovery is what the requester remembers of going back to una and sending again
// (go-back-N), mostly until there is progress.
type recovery struct {
	at uint64 // una at the last go-back that was not a timeout; 0: none since progress
	// single is set after a timeout or probe: one packet goes out, and its
	// answer tells how much of what was in flight arrived.
	single  bool
	probing uint64 // PSN of the probe that may turn out to be needless; 0: none
	resent  uint64 // PSNs below were sent more than once, perhaps
}

// window is how many packets may be outstanding where the congestion window is cwnd.
func (r *recovery) window(cwnd int) uint64 {
	if r.single {
		return 1
	}
	return uint64(cwnd)
}

// begin notes that PSNs before end may be sent again.
func (r *recovery) begin(end uint64) {
	r.resent = end
	r.probing = 0
}

// progress notes that una moved. The answer to a probe is judged by requester.probed.
func (r *recovery) progress() {
	r.at = 0
	r.single = false
}

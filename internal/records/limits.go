// SPDX-License-Identifier: Apache-2.0

package records

import "time"

// staleAfter is the age at which a temporary file cannot belong to a running writer any
// more: a write takes milliseconds, and if the disk hangs, the container runtime or kubelet
// ends the writer earlier.
const staleAfter = time.Hour

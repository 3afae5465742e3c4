// SPDX-License-Identifier: Apache-2.0

package records

import "time"

// staleAfter is when a temporary file cannot belong to a running writer any more:
// a write takes milliseconds, and on a disk that hangs everything else ends before.
const staleAfter = time.Hour

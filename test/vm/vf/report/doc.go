// SPDX-License-Identifier: Apache-2.0

// Package report is what the driver of the VFs' tests prints in a guest and what
// tests read: JSON of these types.
package report

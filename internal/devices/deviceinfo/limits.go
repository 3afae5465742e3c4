// SPDX-License-Identifier: Apache-2.0

package deviceinfo

const (
	// maxBytes bounds a file that is read; they have a few hundred bytes.
	maxBytes = 64 << 10
	// maxFiles bounds the files of a directory that are looked at. A node has some
	// hundred virtual functions.
	maxFiles = 4096
)

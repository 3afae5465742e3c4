// SPDX-License-Identifier: Apache-2.0

package cpio

import (
	"bytes"
	"fmt"
)

// A Writer is an archive in memory. The zero value is an empty one.
type Writer struct {
	buf   bytes.Buffer
	inode int
}

const (
	modeDir  = 0o040000
	modeFile = 0o100000

	trailer = "TRAILER!!!"
	align   = 4
)

// Dir adds a directory.
func (w *Writer) Dir(name string) { w.entry(name, modeDir|0o755, nil) }

// File adds a file.
func (w *Writer) File(name string, perm uint32, content []byte) {
	w.entry(name, modeFile|perm, content)
}

// Part ends the archive and returns it.
func (w *Writer) Part() []byte {
	w.entry(trailer, 0, nil)
	return w.buf.Bytes()
}

// entry writes one header of the format "newc", name and content, each padded.
func (w *Writer) entry(name string, mode uint32, content []byte) {
	w.inode++
	const links, check = 1, 0
	fields := [...]int{w.inode, int(mode), 0, 0, links, 0, len(content), 0, 0, 0, 0, len(name) + 1, check}
	w.buf.WriteString("070701")
	for _, f := range fields {
		_, _ = fmt.Fprintf(&w.buf, "%08X", f)
	}
	w.buf.WriteString(name)
	w.buf.WriteByte(0)
	w.pad()
	w.buf.Write(content)
	w.pad()
}

func (w *Writer) pad() {
	for w.buf.Len()%align != 0 {
		w.buf.WriteByte(0)
	}
}

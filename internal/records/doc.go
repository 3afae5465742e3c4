// SPDX-License-Identifier: Apache-2.0

// Package records keeps a directory of small JSON files, one for each thing that
// must survive the program that knows it.
//
//	d := records.Dir{Path: dir, MaxBytes: 64 << 10, MaxFiles: 4096}
//	err := d.Write("name.json", v)
//	names, err := d.Names()
//	b, err := d.Read(names[0])
//
// A file appears, and gives way to another, in one step and on the disk: after an
// error, or a crash at any moment, the one before stands, or none. A [Dir] has no
// state of its own, so that several processes may use a directory at once; who
// must not write the same file at once needs a lock of its own. What the files say
// is their owners' (packages claims, cni, deviceplugin, vf): they parse and check it.
//
// # Limitations
//
// Names that begin with a dot are the package's. A writer that is killed leaves a
// temporary file, which [Dir.RemoveStale] removes an hour later.
package records

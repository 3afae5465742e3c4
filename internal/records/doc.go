// SPDX-License-Identifier: Apache-2.0

// Package records keeps a directory of small JSON files, one for each thing that
// must survive the program that knows it.
//
//	d := records.Dir{Path: dir, MaxBytes: 64 << 10, MaxFiles: 4096}
//	err := d.Write("name.json", v)
//	names, err := d.Names()
//	b, err := d.Read(names[0])
//
// A file is written and replaced in one step, down to the disk: after an error, or a
// crash at any moment, the previous file is there unchanged, or none. A [Dir] has no
// state of its own, so several processes may use a directory at once; those that might
// write the same file need a lock besides. The packages that own the records (claims,
// cni, deviceplugin, vf) parse and check their content; they have [Pod] in common.
//
// # Limitations
//
// No record may have a name that begins with a dot: these are temporary files. A writer
// that is killed leaves one, which [Dir.RemoveStale] removes. Which writers live it knows by
// their locks (flock), so the directory must be on a file system of the node itself.
package records

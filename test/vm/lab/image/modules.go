// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/smcr-io/kube-smcr/test/vm/lab/cpio"
)

// A chooser copies modules and what they depend on, and reads from the modules
// what that is.
type chooser struct {
	kernel   Kernel
	from, to string            // directories of modules
	paths    map[string]string // name of a module to its file in from
	chosen   map[string]string // name of a module to its file in to
}

// modules puts the wanted modules on the disk, and those of the boot into the
// archive for the initramfs.
func (b *builder) modules(ctx context.Context, kernel Kernel) error {
	release := string(kernel)
	c := &chooser{
		kernel: kernel, from: filepath.Join(b.kernel(), "lib", "modules", release), to: filepath.Join(b.root(), "usr", "lib", "modules", release),
		paths: map[string]string{}, chosen: map[string]string{},
	}
	if _, err := os.Stat(c.from); err != nil {
		c.from = filepath.Join(b.kernel(), "usr", "lib", "modules", release)
	}
	err := filepath.WalkDir(c.from, func(name string, d fs.DirEntry, err error) error {
		if base, ok := strings.CutSuffix(d.Name(), ".ko.xz"); ok && err == nil {
			c.paths[underscored(base)] = name
		}
		return err
	})
	if err != nil {
		return err
	}
	var boot []string
	for _, name := range bootModules {
		if err := c.choose(ctx, name, &boot); err != nil {
			return err
		}
	}
	var rest []string
	for _, name := range modules {
		if err := c.choose(ctx, name, &rest); err != nil {
			return err
		}
	}
	for _, name := range []string{"modules.builtin", "modules.builtin.modinfo", "modules.order"} {
		text, err := os.ReadFile(filepath.Join(c.from, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(c.to, name), text, 0o644); err != nil {
			return err
		}
	}
	if err := command(ctx, b.tmp, "depmod", "-b", b.root(), release); err != nil {
		return err
	}
	return b.bootArchive(c, boot)
}

// bootArchive writes the modules of the boot, numbered in the order in which
// they are to be loaded.
func (b *builder) bootArchive(c *chooser, boot []string) error {
	w := cpio.Writer{}
	w.Dir("modules")
	for i, name := range boot {
		text, err := os.ReadFile(c.chosen[name])
		if err != nil {
			return err
		}
		w.File(fmt.Sprintf("modules/%02d-%s.ko", i, name), 0o644, text)
	}
	return os.WriteFile(filepath.Join(b.out, "modules.cpio"), w.Part(), 0o644)
}

func underscored(name string) string { return strings.ReplaceAll(name, "-", "_") }

// choose unpacks a module after those that it depends on, and appends the names
// to order. One that is built into the kernel is not there and not missed.
func (c *chooser) choose(ctx context.Context, name string, order *[]string) error {
	name = underscored(name)
	if _, ok := c.chosen[name]; ok || slices.Contains(kernels[c.kernel].lacks, name) {
		return nil
	}
	packed, ok := c.paths[name]
	if !ok {
		builtin, err := os.ReadFile(filepath.Join(c.from, "modules.builtin"))
		if err != nil {
			return err
		}
		if strings.Contains(underscored(string(builtin)), "/"+name+".ko\n") {
			return nil
		}
		return fmt.Errorf("kernel %s has no module %s", c.kernel, name)
	}
	rel, err := filepath.Rel(c.from, packed)
	if err != nil {
		return err
	}
	file := filepath.Join(c.to, strings.TrimSuffix(rel, ".xz"))
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	// Not compressed: the guest has less time than the disk has room.
	if err := command(ctx, c.to, "sh", "-c", `xz -dc "$1" >"$2"`, "sh", packed, file); err != nil {
		return err
	}
	if err := cutSignature(file); err != nil {
		return err
	}
	needs, err := dependencies(file)
	if err != nil {
		return err
	}
	c.chosen[name] = file
	for _, need := range needs {
		if err := c.choose(ctx, need, order); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	*order = append(*order, name)
	return nil
}

// cutSignature removes the signature at the end of a module: a guest would check it
// for half a second each, and only says that it is tainted when there is none. The
// signature ends in its length and a mark.
func cutSignature(file string) error {
	const mark, lengthBytes, infoBytes = "~Module signature appended~\n", 4, 12
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	signed, ok := bytes.CutSuffix(text, []byte(mark))
	if !ok || len(signed) < infoBytes {
		return nil
	}
	length := int(binary.BigEndian.Uint32(signed[len(signed)-lengthBytes:]))
	end := len(signed) - infoBytes - length
	if end < 0 {
		return fmt.Errorf("%s has a signature of %d bytes, more than there are", filepath.Base(file), length)
	}
	return os.Truncate(file, int64(end))
}

// dependencies reads the names of the modules that a module needs.
func dependencies(file string) ([]string, error) {
	f, err := elf.Open(file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("%s has no section .modinfo", file)
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	for field := range bytes.SplitSeq(info, []byte{0}) {
		if names, ok := strings.CutPrefix(string(field), "depends="); ok && names != "" {
			return strings.Split(names, ","), nil
		}
	}
	return nil, nil
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
)

// probe is a line of tools/deps.sh: a package, the program or file that shows that the machine has it, and what for.
var probe = regexp.MustCompile(`(?m)^[a-z0-9.+-]+ +(\S+) {2,}\S`)

// programs returns what tests run of the machine, as tools/deps.sh has it: names of programs, and paths.
func programs(dir string) (all []string, err error) {
	text, err := os.ReadFile(filepath.Join(dir, "tools", "deps.sh"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, m := range probe.FindAllSubmatch(text, -1) {
		all = append(all, string(m[1]))
	}
	return all, nil
}

// hashMachine is the hash of the kernel and of the programs that tests run. As go test does, it knows files by size and time.
func hashMachine(dir string) (string, error) {
	h := sha256.New()
	for _, f := range []string{"/proc/sys/kernel/osrelease", "/proc/sys/kernel/version"} {
		b, err := os.ReadFile(f)
		if err != nil {
			return "", fmt.Errorf("ask for the kernel: %w", err)
		}
		h.Write(b)
	}
	names, err := programs(dir)
	if err != nil {
		return "", err
	}
	for _, name := range names {
		file, err := exec.LookPath(name)
		if err != nil {
			file = name // a file, or not there
		}
		if i, err := os.Stat(file); err == nil {
			_, _ = fmt.Fprintln(h, file, i.Size(), i.ModTime().UnixNano())
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:12]), nil
}

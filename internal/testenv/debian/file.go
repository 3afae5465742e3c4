// SPDX-License-Identifier: Apache-2.0

package debian

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
)

// snapshot is a state of the archive that is kept for good.
const snapshot = "https://snapshot.debian.org/archive/debian/20261115T000000Z"

// aptHelper takes the proxies and certificates that apt-get takes.
const aptHelper = "/usr/lib/apt/apt-helper"

// A File is one of a certain version: mirrors keep it until the next version, the
// snapshots for good.
type File struct {
	Dir    string // below the archive's root, with a slash at its end
	Name   string
	SHA256 string
}

// urls are where the file may be, the nearest place first.
func (f File) urls(mirrors []string) []string {
	var out []string
	for _, m := range mirrors {
		out = append(out, m+"/"+f.Dir+f.Name)
	}
	return append(out, snapshot+"/"+f.Dir+f.Name)
}

// Download gets the file into a directory from the first place that has it, and
// returns its path.
func (f File) Download(ctx context.Context, dir string) (string, error) {
	file := filepath.Join(dir, f.Name)
	var errs []error
	for _, url := range f.urls(Mirrors()) {
		cmd := exec.CommandContext(ctx, aptHelper, "-o", "APT::Sandbox::User=root", "download-file", url, file, "SHA256:"+f.SHA256)
		cmd.Env = append(os.Environ(), "LC_ALL=C")
		text, err := cmd.CombinedOutput()
		if err != nil {
			const tail = 2000
			err = fmt.Errorf("%w\n%s", err, text[max(0, len(text)-tail):])
		} else {
			err = f.check(file)
		}
		if err == nil {
			return file, nil
		}
		errs = append(errs, fmt.Errorf("download %s: %w", url, err))
	}
	return "", fmt.Errorf("no mirror has the file that this is pinned to: %w", errors.Join(errs...))
}

// check says whether a file has the bytes that it is pinned to.
func (f File) check(name string) error {
	r, err := os.Open(name)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		return err
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != f.SHA256 {
		return fmt.Errorf("%s has SHA-256 %s, not %s", filepath.Base(name), got, f.SHA256)
	}
	return nil
}

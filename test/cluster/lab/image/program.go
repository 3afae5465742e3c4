// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Program returns the program called name, found as a shell does, with the
// libraries that it is linked with, each at its place on this machine.
func Program(ctx context.Context, name string) ([]File, error) {
	file, err := lookPath(name)
	if err != nil {
		return nil, fmt.Errorf("pack program %s (tools/deps.sh runtime installs what is missing): %w", name, err)
	}
	files := []File{{Name: file, Source: file}}
	out, err := exec.CommandContext(ctx, "ldd", file).CombinedOutput()
	if err != nil {
		if strings.Contains(string(out), "not a dynamic executable") || strings.Contains(string(out), "statically linked") {
			return files, nil
		}
		return nil, fmt.Errorf("find the libraries of %s: %w\n%s", file, err, out)
	}
	libraries, err := parseLDD(string(out))
	if err != nil {
		return nil, fmt.Errorf("find the libraries of %s: %w", file, err)
	}
	for _, l := range libraries {
		files = append(files, File{Name: l, Source: l})
	}
	return files, nil
}

// lookPath also looks where daemons are.
func lookPath(name string) (string, error) {
	file, err := exec.LookPath(name)
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if err == nil {
			break
		}
		if full := filepath.Join(dir, name); isProgram(full) {
			file, err = full, nil
		}
	}
	if err != nil {
		return "", err
	}
	return filepath.Abs(file)
}

func isProgram(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// parseLDD returns the files of ldd's output:
//
//	linux-vdso.so.1 (0x00007ffc)
//	libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f01)
//	/lib64/ld-linux-x86-64.so.2 (0x00007f02)
func parseLDD(out string) ([]string, error) {
	var files []string
	for line := range strings.Lines(out) {
		words := strings.Fields(line)
		switch {
		case len(words) >= 4 && words[1] == "=>" && words[2] == "not":
			return nil, fmt.Errorf("library %s is not installed", words[0])
		case len(words) >= 3 && words[1] == "=>" && strings.HasPrefix(words[2], "/"):
			files = append(files, words[2])
		case len(words) >= 1 && strings.HasPrefix(words[0], "/"):
			files = append(files, words[0])
		case len(words) >= 1 && (strings.HasPrefix(words[0], "linux-") || words[0] == "statically"):
		case len(words) == 0:
		default:
			return nil, errors.New("ldd printed " + strings.TrimSpace(line))
		}
	}
	return files, nil
}

// Users are the files in which programs look up users and groups: root and
// nobody.
func Users() []File {
	return []File{
		{Name: "etc/passwd", Content: []byte("root:x:0:0:root:/root:/sbin/nologin\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n")},
		{Name: "etc/group", Content: []byte("root:x:0:\nnogroup:x:65534:\n")},
		{Name: "tmp", Dir: true, Mode: 0o1777},
	}
}

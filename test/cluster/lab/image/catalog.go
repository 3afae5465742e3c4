// SPDX-License-Identifier: Apache-2.0

package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"sigs.k8s.io/yaml"
)

// registry is the registry of all names: there is no such host, so that an image
// that was not loaded is not silently fetched from somewhere.
const registry = "kube-smcr.local/"

// Product is the name of the image with this project's programs, as the
// chart's values call it: repository and tag.
const (
	ProductRepository = registry + "kube-smcr"
	ProductTag        = "dev"
	Product           = ProductRepository + ":" + ProductTag
)

// The images of unmodified applications, from the distribution's packages. Each
// has a shell and a few tools beside its program.
const (
	Redis  = registry + "redis:1"  // redis-server on port 6379; redis-cli, redis-benchmark
	Nginx  = registry + "nginx:1"  // nginx on port 8080, with /1M
	Curl   = registry + "curl:1"   // curl
	Iperf3 = registry + "iperf3:1" // iperf3 -s on port 5201
)

// Refs are the names of the images that Build knows.
func Refs() []string { return []string{Product, Redis, Nginx, Curl, Iperf3} }

// ChartRef is the name of the image that the chart of the checkout installs unless it is
// told otherwise: ghcr.io/smcr-io/kube-smcr with the chart's appVersion.
func ChartRef(ctx context.Context) (string, error) {
	root, err := moduleRoot(ctx)
	if err != nil {
		return "", err
	}
	var values struct {
		Image struct{ Repository, Tag string }
	}
	var chart struct{ AppVersion string }
	for name, into := range map[string]any{"values.yaml": &values, "Chart.yaml": &chart} {
		text, err := os.ReadFile(filepath.Join(root, "charts", "kube-smcr", name))
		if err == nil {
			err = yaml.Unmarshal(text, into)
		}
		if err != nil {
			return "", fmt.Errorf("read the chart's %s: %w", name, err)
		}
	}
	return values.Image.Repository + ":" + cmp.Or(values.Image.Tag, chart.AppVersion), nil
}

// nobody runs what needs no rights.
const nobody = "65534:65534"

// Build packs the images of these names, or of all of [Refs], into files in dir and
// returns the files, in the same order. [ChartRef] is a name, too. It takes the working directory to be
// in a checkout.
func Build(ctx context.Context, dir string, refs ...string) ([]string, error) {
	if len(refs) == 0 {
		refs = Refs()
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("pack images: %w", err)
	}
	archives, errs := make([]string, len(refs)), make([]error, len(refs))
	var wg sync.WaitGroup
	for i, ref := range refs {
		archives[i] = filepath.Join(dir, fileName(ref))
		wg.Go(func() {
			img, err := describe(ctx, dir, ref)
			if err == nil {
				err = Write(archives[i], img)
			}
			errs[i] = err
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return archives, nil
}

// fileName is redis.tar for kube-smcr.local/redis:1, and kube-smcr-0.1.0.tar for
// ghcr.io/smcr-io/kube-smcr:0.1.0, which is not only for tests.
func fileName(ref string) string {
	name, tag, _ := strings.Cut(ref[strings.LastIndexByte(ref, '/')+1:], ":")
	if !strings.HasPrefix(ref, registry) {
		name += "-" + tag
	}
	return name + ".tar"
}

func describe(ctx context.Context, dir, ref string) (Image, error) {
	img := Image{Ref: ref, User: nobody}
	var programs []string
	switch ref {
	case Product:
		return product(ctx, dir, ref)
	case Redis:
		programs = []string{"redis-server", "redis-cli", "redis-benchmark"}
		img.Entrypoint = []string{"redis-server"}
		img.Cmd = []string{"--save", "", "--appendonly", "no", "--protected-mode", "no", "--bind", "*", "-::*", "--dir", "/tmp"}
	case Nginx:
		programs = []string{"nginx"}
		img.Entrypoint = []string{"nginx", "-e", "stderr", "-c", "/etc/nginx/nginx.conf"}
		img.Files = nginxFiles()
	case Curl:
		programs = []string{"curl"}
		img.Entrypoint = []string{"curl"}
	case Iperf3:
		programs = []string{"iperf3"}
		img.Entrypoint = []string{"iperf3"}
		img.Cmd = []string{"-s"}
	default:
		chart, err := ChartRef(ctx)
		if err != nil {
			return Image{}, err
		}
		if ref == chart {
			return product(ctx, dir, ref)
		}
		return Image{}, fmt.Errorf("pack %s: no such image; there are %s", ref, strings.Join(Refs(), ", "))
	}
	for _, p := range append(programs, shellTools()...) {
		files, err := Program(ctx, p)
		if err != nil {
			return Image{}, fmt.Errorf("pack %s: %w", ref, err)
		}
		img.Files = append(img.Files, files...)
	}
	img.Files = append(img.Files, Users()...)
	return img, nil
}

// shellTools are what a test or a curious person wants beside an application.
func shellTools() []string {
	return []string{"sh", "cat", "date", "dd", "env", "grep", "head", "ls", "seq", "sha256sum", "sleep", "timeout", "wc"}
}

// nginxFiles are its configuration and what it serves.
func nginxFiles() []File {
	const conf = `daemon off;
worker_processes 2;
pid /tmp/nginx.pid;
error_log stderr;
events { worker_connections 1024; }
http {
  access_log off;
  sendfile on;
  keepalive_requests 1000000;
  client_body_temp_path /tmp/body;
  proxy_temp_path /tmp/proxy;
  fastcgi_temp_path /tmp/fastcgi;
  uwsgi_temp_path /tmp/uwsgi;
  scgi_temp_path /tmp/scgi;
  server {
    listen 8080;
    listen [::]:8080;
    root /usr/share/nginx/html;
  }
}
`
	line := []byte("The quick brown fox jumps over the lazy dog, and over the fence.\n")
	const megabyte = 1 << 20
	return []File{
		{Name: "etc/nginx/nginx.conf", Content: []byte(conf)},
		{Name: "usr/share/nginx/html/index.html", Content: []byte("hello from nginx\n")},
		{Name: "usr/share/nginx/html/1M", Content: slices.Repeat(line, megabyte/len(line)+1)[:megabyte]},
	}
}

// product builds this project's programs as the Dockerfile does, and describes
// the image with them.
func product(ctx context.Context, dir, ref string) (Image, error) {
	root, err := moduleRoot(ctx)
	if err != nil {
		return Image{}, err
	}
	commands, err := Commands(root)
	if err != nil {
		return Image{}, err
	}
	bin := filepath.Join(dir, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return Image{}, fmt.Errorf("build the programs: %w", err)
	}
	img := Image{Ref: ref, Entrypoint: []string{"/usr/bin/node-agent"}, Files: Users()}
	flags := "-ldflags=-s -w"
	if v := versionOf(ctx, root); v != "" {
		flags += " -X github.com/smcr-io/kube-smcr/internal/version.linked=" + v
	}
	libraries, verbs, err := runtimeFiles(ctx)
	if err != nil {
		return Image{}, err
	}
	img.Files = append(img.Files, libraries...)
	for _, c := range commands {
		name := c.Program
		program := filepath.Join(bin, name)
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", flags, "-o", program, c.Package)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), c.cgo(verbs))
		if out, err := cmd.CombinedOutput(); err != nil {
			return Image{}, fmt.Errorf("build %s: %w\n%s", name, err, out)
		}
		img.Files = append(img.Files, File{Name: "usr/bin/" + name, Source: program})
	}
	return img, nil
}

// versionOf is the version of a checkout that Go does not find out itself: that of
// a worktree, or of another user's. It is empty if git does not know either.
func versionOf(ctx context.Context, root string) string {
	out, err := exec.CommandContext(ctx, "git", "-c", "safe.directory=*", "-C", root, "describe", "--tags", "--always", "--dirty").Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

// A Command is a program of the product.
type Command struct {
	Program string // what it is called in /usr/bin
	Package string // relative to the checkout's root
}

// cgo is how the program is built: the one that uses libibverbs with C, if that
// is here, and the others without.
func (c Command) cgo(verbs bool) string {
	if c.Program == "node-agent" && verbs {
		return "CGO_ENABLED=1"
	}
	return "CGO_ENABLED=0"
}

// Commands are the programs of the checkout at root, which are those of the
// image: the Dockerfile has them, too.
func Commands(root string) ([]Command, error) {
	entries, err := os.ReadDir(filepath.Join(root, "cmd"))
	if err != nil {
		return nil, fmt.Errorf("look for the programs: %w", err)
	}
	var out []Command
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		c := Command{Program: e.Name(), Package: "./cmd/" + e.Name()}
		if e.Name() == "cni-plugin" { // what a CNI configuration calls it
			c.Program = "smcr-cni"
		}
		out = append(out, c)
	}
	return out, nil
}

// moduleRoot is the directory of the module that the working directory is in.
func moduleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	mod := strings.TrimSpace(string(out))
	if err != nil || mod == "" || mod == os.DevNull {
		return "", fmt.Errorf("find the checkout (run this inside of it): %q, %w", mod, err)
	}
	return filepath.Dir(mod), nil
}

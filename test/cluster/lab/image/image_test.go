// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// readTar returns the entries of an archive: name to content, or "-> target".
func readTar(t *testing.T, b []byte) map[string]string {
	t.Helper()
	entries := map[string]string{}
	for r := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return entries
		}
		if err != nil {
			t.Fatalf("read archive: %v", err)
		}
		if !h.ModTime.Equal(epoch) || h.Uid != 0 || h.Gid != 0 {
			t.Errorf("%s: time %v, owner %d:%d; want %v and 0:0", h.Name, h.ModTime, h.Uid, h.Gid, epoch)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatalf("read %s: %v", h.Name, err)
		}
		if h.Typeflag == tar.TypeSymlink {
			text = []byte("-> " + h.Linkname)
		}
		entries[h.Name] = string(text)
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "source")
	if err := os.WriteFile(source, []byte("program"), 0o600); err != nil {
		t.Fatal(err)
	}
	img := Image{
		Ref:        "kube-smcr.local/x:7",
		Entrypoint: []string{"/usr/bin/x"},
		User:       nobody,
		Files: []File{
			{Name: "/usr/bin/x", Source: source},
			{Name: "etc/conf", Content: []byte("old")},
			{Name: "etc/conf", Content: []byte("new")},
			{Name: "bin/x", Link: "/usr/bin/x"},
			{Name: "tmp", Dir: true, Mode: 0o1777},
		},
	}
	name := filepath.Join(dir, "x.tar")
	if err := Write(name, img); err != nil {
		t.Fatal(err)
	}
	first, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}

	layout := readTar(t, first)
	var index struct{ Manifests []descriptor }
	decode(t, layout["index.json"], &index)
	if len(index.Manifests) != 1 || index.Manifests[0].Annotations["io.containerd.image.name"] != img.Ref {
		t.Fatalf("index %s does not name one image %s", layout["index.json"], img.Ref)
	}
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	decode(t, blob(t, layout, index.Manifests[0]), &manifest)
	var config struct {
		Config struct {
			Entrypoint []string
			User       string
		} `json:"config"`
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		} `json:"rootfs"`
	}
	decode(t, blob(t, layout, manifest.Config), &config)
	if diff := cmp.Diff(img.Entrypoint, config.Config.Entrypoint); diff != "" || config.Config.User != nobody {
		t.Errorf("user %q, entry point (-want +got):\n%s", config.Config.User, diff)
	}
	if diff := cmp.Diff([]string{manifest.Layers[0].Digest}, config.RootFS.DiffIDs); diff != "" {
		t.Errorf("diff ids (-want +got):\n%s", diff)
	}
	want := map[string]string{
		"bin/": "", "bin/x": "-> /usr/bin/x", "etc/": "", "etc/conf": "new", "tmp/": "",
		"usr/": "", "usr/bin/": "", "usr/bin/x": "program",
	}
	if diff := cmp.Diff(want, readTar(t, []byte(blob(t, layout, manifest.Layers[0])))); diff != "" {
		t.Errorf("layer (-want +got):\n%s", diff)
	}

	if ref, digest, err := Identify(name); err != nil || ref != img.Ref || digest != index.Manifests[0].Digest {
		t.Errorf("Identify() = %s, %s, %v; want %s, %s", ref, digest, err, img.Ref, index.Manifests[0].Digest)
	}

	// The same input gives the same bytes, and no temporary file stays.
	if err := Write(name, img); err != nil {
		t.Fatal(err)
	}
	second, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first, second) {
		t.Error("two archives of one image differ")
	}
	if names, _ := filepath.Glob(filepath.Join(dir, ".*")); len(names) > 0 {
		t.Errorf("%q are left behind", names)
	}
}

func decode(t *testing.T, text string, to any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), to); err != nil {
		t.Fatalf("parse %q: %v", text, err)
	}
}

// blob returns the content that a descriptor names, after checking that it is
// the content named.
func blob(t *testing.T, layout map[string]string, d descriptor) string {
	t.Helper()
	text, ok := layout["blobs/sha256/"+strings.TrimPrefix(d.Digest, "sha256:")]
	if !ok || int64(len(text)) != d.Size || digestOf([]byte(text)) != d.Digest {
		t.Fatalf("blob %s: %d bytes, digest %s; want %d bytes", d.Digest, len(text), digestOf([]byte(text)), d.Size)
	}
	return text
}

func TestWriteFails(t *testing.T) {
	dir := t.TempDir()
	tests := []struct {
		name string
		img  Image
		want string
	}{
		{name: "no name", img: Image{}, want: "no name"},
		{name: "source is gone", img: Image{Ref: "x:1", Files: []File{{Name: "a", Source: dir + "/gone"}}}, want: "gone"},
		{name: "source is a directory", img: Image{Ref: "x:1", Files: []File{{Name: "a", Source: dir}}}, want: "not a regular file"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := Write(filepath.Join(dir, "x.tar"), tt.img)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Write() = %v, want an error with %q", err, tt.want)
			}
			if entries, _ := os.ReadDir(dir); len(entries) > 0 {
				t.Errorf("%v is left behind", entries)
			}
		})
	}
}

func TestParseLDD(t *testing.T) {
	tests := []struct {
		name, out string
		want      []string
		wantErr   string
	}{
		{
			name: "libraries",
			out: "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f01)\n" +
				"\t/lib64/ld-linux-x86-64.so.2 (0x00007f02)\n",
			want: []string{"/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"},
		},
		{name: "static", out: "\tstatically linked\n"},
		{name: "missing", out: "\tlibx.so.1 => not found\n", wantErr: "libx.so.1 is not installed"},
		{name: "junk", out: "what\n", wantErr: "what"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseLDD(tt.out)
			if (err != nil) != (tt.wantErr != "") || err != nil && !strings.Contains(err.Error(), tt.wantErr) {
				t.Fatalf("error %v, want %q", err, tt.wantErr)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestDescribeUnknown(t *testing.T) {
	if _, err := Build(t.Context(), t.TempDir(), "kube-smcr.local/what:1"); err == nil || !strings.Contains(err.Error(), Redis) {
		t.Errorf("Build() = %v, want an error that lists the images", err)
	}
}

// What is no archive of ours has no name.
func TestIdentify_fails(t *testing.T) {
	pack := func(name, content string) string {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Size: int64(len(content))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	for _, tt := range []struct{ name, archive, want string }{
		{"no archive", "x", "unexpected EOF"},
		{"without an index", pack("x", "{}"), "no index.json"},
		{"an index that is none", pack(indexFile, "x"), "invalid character"},
		{"an index of nothing", pack(indexFile, "{}"), "does not name one image"},
		{"an image without a name", pack(indexFile, `{"manifests":[{"digest":"sha256:0"}]}`), "does not name one image"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "x.tar")
			if err := os.WriteFile(file, []byte(tt.archive), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, _, err := Identify(file); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q in it", err, tt.want)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// An Image says what is in an image and how it is run.
type Image struct {
	// Ref is its full name, with registry and tag.
	Ref        string
	Entrypoint []string
	Cmd        []string
	Env        []string
	User       string
	Labels     map[string]string
	Files      []File
}

// A File is a file, a directory or a link of an image.
type File struct {
	// Name is where it is in the image, with or without a slash in front.
	Name string
	// Source is the file of this machine with its content. Without it Content is
	// the content, or Link what the name points to, or it is a directory.
	Source  string
	Content []byte
	Link    string
	Dir     bool
	// Mode is its permissions; 0 is 0755 for directories and files with Source,
	// and else 0644.
	Mode int64
}

// epoch is the time of everything in an image.
var epoch = time.Unix(0, 0).UTC()

const (
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar"
	indexType    = "application/vnd.oci.image.index.v1+json"
)

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Platform    *platform         `json:"platform,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

// Write packs an image into the file name, by way of a temporary file beside
// it.
func Write(name string, img Image) (err error) {
	if img.Ref == "" {
		return errors.New("pack an image: it has no name")
	}
	layer, err := os.CreateTemp(filepath.Dir(name), ".layer-")
	if err != nil {
		return fmt.Errorf("pack %s: %w", img.Ref, err)
	}
	defer func() { _ = errors.Join(layer.Close(), os.Remove(layer.Name())) }()
	digest, size, err := writeLayer(layer, img.Files)
	if err != nil {
		return fmt.Errorf("pack %s: %w", img.Ref, err)
	}
	if _, err := layer.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("pack %s: %w", img.Ref, err)
	}
	out, err := os.CreateTemp(filepath.Dir(name), ".image-")
	if err != nil {
		return fmt.Errorf("pack %s: %w", img.Ref, err)
	}
	err = writeLayout(out, img, digest, size, layer)
	if err = errors.Join(err, out.Chmod(0o644), out.Close()); err == nil {
		err = os.Rename(out.Name(), name)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("pack %s: %w", img.Ref, err), os.Remove(out.Name()))
	}
	return nil
}

// writeLayer writes the files as an archive and returns its digest and size.
func writeLayer(to io.Writer, files []File) (digest string, size int64, err error) {
	sum := sha256.New()
	count := &counter{}
	w := tar.NewWriter(io.MultiWriter(to, sum, count))
	for _, f := range withDirectories(files) {
		if err := writeEntry(w, f); err != nil {
			return "", 0, fmt.Errorf("file %s: %w", f.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		return "", 0, fmt.Errorf("end the layer: %w", err)
	}
	return hex.EncodeToString(sum.Sum(nil)), count.n, nil
}

type counter struct{ n int64 }

func (c *counter) Write(b []byte) (int, error) {
	c.n += int64(len(b))
	return len(b), nil
}

// withDirectories cleans and sorts the names and adds the directories in which
// the files are. Of two files with one name the last counts.
func withDirectories(files []File) []File {
	all := map[string]File{}
	for _, f := range files {
		f.Name = strings.TrimPrefix(path.Clean("/"+f.Name), "/")
		for dir := path.Dir(f.Name); dir != "."; dir = path.Dir(dir) {
			if _, ok := all[dir]; !ok {
				all[dir] = File{Name: dir, Dir: true}
			}
		}
		all[f.Name] = f
	}
	delete(all, "")
	sorted := make([]File, 0, len(all))
	for _, f := range all {
		sorted = append(sorted, f)
	}
	slices.SortFunc(sorted, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	return sorted
}

func writeEntry(w *tar.Writer, f File) error {
	header := &tar.Header{Name: f.Name, Mode: f.Mode, ModTime: epoch, Format: tar.FormatPAX}
	switch {
	case f.Dir:
		header.Typeflag, header.Name = tar.TypeDir, f.Name+"/"
	case f.Link != "":
		header.Typeflag, header.Linkname, header.Mode = tar.TypeSymlink, f.Link, 0o777
	case f.Source != "":
		return writeSource(w, header, f.Source)
	default:
		header.Typeflag, header.Size = tar.TypeReg, int64(len(f.Content))
		if header.Mode == 0 {
			header.Mode = 0o644
		}
	}
	if header.Mode == 0 {
		header.Mode = 0o755
	}
	if err := w.WriteHeader(header); err != nil {
		return err
	}
	_, err := w.Write(f.Content)
	return err
}

func writeSource(w *tar.Writer, header *tar.Header, source string) error {
	in, err := os.Open(source)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", source)
	}
	header.Typeflag, header.Size = tar.TypeReg, info.Size()
	if header.Mode == 0 {
		header.Mode = 0o755
	}
	if err := w.WriteHeader(header); err != nil {
		return err
	}
	_, err = io.Copy(w, in)
	return err
}

// documents are the parts of an image layout that describe the image.
type documents struct{ config, manifest, index []byte }

// documentsOf makes the documents of an image with one layer.
func documentsOf(img Image, layerDigest string, layerSize int64) (d documents, err error) {
	p := &platform{Architecture: runtime.GOARCH, OS: "linux"}
	d.config, err = json.Marshal(map[string]any{
		"architecture": p.Architecture,
		"os":           p.OS,
		"created":      epoch.Format(time.RFC3339),
		"config": map[string]any{
			"Entrypoint": img.Entrypoint,
			"Cmd":        img.Cmd,
			"Env":        append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, img.Env...),
			"User":       img.User,
			"Labels":     img.Labels,
			"WorkingDir": "/",
		},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + layerDigest}},
	})
	if err != nil {
		return d, err
	}
	d.manifest, err = json.Marshal(map[string]any{
		"schemaVersion": 2,
		"mediaType":     manifestType,
		"config":        descriptor{MediaType: configType, Digest: digestOf(d.config), Size: int64(len(d.config))},
		"layers":        []descriptor{{MediaType: layerType, Digest: "sha256:" + layerDigest, Size: layerSize}},
	})
	if err != nil {
		return d, err
	}
	_, tag, _ := strings.Cut(img.Ref[strings.LastIndexByte(img.Ref, '/')+1:], ":")
	d.index, err = json.Marshal(map[string]any{
		"schemaVersion": 2,
		"mediaType":     indexType,
		"manifests": []descriptor{{
			MediaType: manifestType, Digest: digestOf(d.manifest), Size: int64(len(d.manifest)), Platform: p,
			Annotations: map[string]string{
				refKey:                              img.Ref,
				"org.opencontainers.image.ref.name": tag,
			},
		}},
	})
	return d, err
}

// writeLayout writes the archive that is an image layout.
func writeLayout(to io.Writer, img Image, layerDigest string, layerSize int64, layer io.Reader) error {
	d, err := documentsOf(img, layerDigest, layerSize)
	if err != nil {
		return err
	}
	w := tar.NewWriter(to)
	blob := func(digest string) string { return "blobs/sha256/" + strings.TrimPrefix(digest, "sha256:") }
	for _, dir := range []string{"blobs/", "blobs/sha256/"} {
		if err := w.WriteHeader(&tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755, ModTime: epoch}); err != nil {
			return err
		}
	}
	for _, f := range []struct {
		name string
		text []byte
	}{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{indexFile, d.index},
		{blob(digestOf(d.manifest)), d.manifest},
		{blob(digestOf(d.config)), d.config},
	} {
		if err := writePart(w, f.name, int64(len(f.text)), bytes.NewReader(f.text)); err != nil {
			return err
		}
	}
	if err := writePart(w, blob(layerDigest), layerSize, layer); err != nil {
		return err
	}
	return w.Close()
}

// writePart writes a file of an image layout.
func writePart(w *tar.Writer, name string, size int64, from io.Reader) error {
	if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size, ModTime: epoch}); err != nil {
		return err
	}
	_, err := io.Copy(w, from)
	return err
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

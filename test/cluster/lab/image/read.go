// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
)

// indexFile is the file of an archive that names the image.
const indexFile = "index.json"

// refKey is the annotation with an image's name that containerd heeds.
const refKey = "io.containerd.image.name"

// Identify returns the name of the image in an archive of [Write], and its digest: two archives of
// one digest have the same content.
func Identify(archive string) (ref, digest string, err error) {
	in, err := os.Open(archive)
	if err != nil {
		return "", "", fmt.Errorf("identify an image: %w", err)
	}
	defer func() { _ = in.Close() }()
	ref, digest, err = identify(in)
	if err != nil {
		return "", "", fmt.Errorf("identify the image in %s: %w", archive, err)
	}
	return ref, digest, nil
}

func identify(archive io.Reader) (ref, digest string, err error) {
	for r := tar.NewReader(archive); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return "", "", errors.New("no " + indexFile)
		}
		if err != nil {
			return "", "", err
		}
		if h.Name != indexFile {
			continue
		}
		var index struct{ Manifests []descriptor }
		if err := json.NewDecoder(r).Decode(&index); err != nil {
			return "", "", err
		}
		if len(index.Manifests) != 1 || index.Manifests[0].Annotations[refKey] == "" {
			return "", "", errors.New(indexFile + " does not name one image")
		}
		m := index.Manifests[0]
		return m.Annotations[refKey], m.Digest, nil
	}
}

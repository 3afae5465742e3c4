// SPDX-License-Identifier: Apache-2.0

package apps

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/smcr-io/kube-smcr/internal/testenv/debian"
	"github.com/smcr-io/kube-smcr/internal/testenv/kept"
)

// A source is an application's source, and what is built of it for its tests.
type source struct {
	file  debian.File
	build string // a shell script; its directory is the source's
}

// sources are the source packages of the programs under test, as Debian 12 has them.
var sources = map[string]source{
	"redis": {
		file: debian.File{
			Dir: "pool/main/r/redis/", Name: "redis_7.0.15.orig.tar.gz",
			SHA256: "4b1dc4ee6d622a09fff9c6777191209750fb5e5a725ef78ea012d6eef4c22982",
		},
		build: `find . -mindepth 1 -maxdepth 1 ! -name tests ! -name COPYING -exec rm -r {} +`,
	},
	"memcached": {
		file: debian.File{
			Dir: "pool/main/m/memcached/", Name: "memcached_1.6.18.orig.tar.xz",
			SHA256: "35872bd25f8d29d7cc2072d23e74344530891bfd0aa4f4f64184a8ae7291164b",
		},
		build: `gcc -O -o timedrun timedrun.c
			find . -mindepth 1 -maxdepth 1 ! -name t ! -name doc ! -name timedrun ! -name COPYING -exec rm -r {} +`,
	},
	"curl": {
		file: debian.File{
			Dir: "pool/main/c/curl/", Name: "curl_7.88.1.orig.tar.gz",
			SHA256: "cdb38b72e36bc5d33d5b8810f8018ece1baa29a8f215b4495e495ded82bbf3c7",
		},
		build: `./configure --without-ssl --disable-ldap --disable-ldaps --without-zlib --without-brotli --without-zstd \
				--without-libpsl --without-nghttp2 --without-libidn2 --without-librtmp --disable-manual --disable-shared --disable-dependency-tracking
			make -C tests/server
			find . -mindepth 1 -maxdepth 1 ! -name tests ! -name lib ! -name COPYING -exec rm -r {} +
			find lib -type f ! -name curl_config.h -delete`,
	},
}

// get returns the directory with an application's suite, which nobody may change, and
// makes it if it is not there.
func (s source) get(ctx context.Context, name string, progress io.Writer) (string, error) {
	dir, err := kept.Dir("apps/"+name+"-", s.file, s.build)
	if err != nil {
		return "", err
	}
	there := func() bool { _, err := os.Stat(dir); return err == nil }
	if there() {
		return dir, nil
	}
	return dir, kept.Make(dir, "apps", "the tests of "+name, progress, there, func(tmp string) (string, error) {
		_, _ = fmt.Fprintf(progress, "apps: download and build the tests of %s\n", name)
		archive, err := s.file.Download(ctx, tmp)
		if err != nil {
			return "", err
		}
		out := filepath.Join(tmp, "out")
		cmd := exec.CommandContext(ctx, "sh", "-euc", `mkdir "$2" && tar -xf "$1" -C "$2" --strip-components=1 --no-same-owner && cd "$2" && `+s.build, "sh", archive, out)
		if text, err := cmd.CombinedOutput(); err != nil {
			const tail = 2000
			return "", fmt.Errorf("%w\n%s", err, text[max(0, len(text)-tail):])
		}
		return out, nil
	})
}

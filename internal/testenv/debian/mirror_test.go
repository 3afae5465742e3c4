// SPDX-License-Identifier: Apache-2.0

package debian

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMirrors(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		want  []string
	}{
		{name: "no configuration"},
		{
			name: "one line each",
			files: map[string]string{"sources.list": `# deb http://commented.example/debian bookworm main
deb http://security.example/debian-security bookworm-security main
deb-src http://sources.example/debian bookworm main
deb [ arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg ] https://mirror.example/debian/ bookworm main contrib # ours
deb https://mirror.example/debian bookworm-updates main
deb [broken
deb cdrom:[Debian]/ bookworm main
`},
			want: []string{"https://mirror.example/debian"},
		},
		{
			name: "deb822",
			files: map[string]string{"sources.list.d/debian.sources": `Types: deb deb-src
# a comment within a paragraph
URIs: http://first.example/debian
 https://second.example/debian/
suites: trixie trixie-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main
`},
			want: []string{"http://first.example/debian", "https://second.example/debian"},
		},
		{
			name: "others that use the suites' names",
			files: map[string]string{
				"sources.list.d/a.list":    "deb [signed-by=/usr/share/keyrings/a-archive-keyring.gpg] https://a.example/stable/debian bookworm main\n",
				"sources.list.d/b.sources": "Types: deb\nURIs: https://b.example\nSuites: bookworm\nComponents: main\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n",
				"sources.list.d/c.sources": "Types: deb\nURIs: https://c.example/linux/debian\nSuites: bookworm\nComponents: stable\n",
				"sources.list.d/d.list":    "deb https://d.example/pub/apt bookworm-pgdg main\n",
			},
		},
		{
			name:  "Ubuntu",
			files: map[string]string{"sources.list": "deb http://archive.ubuntu.com/ubuntu noble main universe\n"},
		},
		{
			name:  "the default",
			files: map[string]string{"sources.list": "deb http://deb.debian.org/debian/ stable main\n"},
		},
		{
			name:  "schemes that only apt-get has",
			files: map[string]string{"sources.list.d/debian.sources": "Types: deb\nURIs: mirror+file:/etc/apt/mirrors/debian.list\nSuites: bookworm\nComponents: main\n"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "sources.list.d"), 0o700); err != nil {
				t.Fatal(err)
			}
			for name, text := range c.files {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(append(c.want, defaultMirror), mirrors(dir)); diff != "" {
				t.Errorf("mirrors (-want +got):\n%s", diff)
			}
		})
	}
}

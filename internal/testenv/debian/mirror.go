// SPDX-License-Identifier: Apache-2.0

package debian

import (
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// defaultMirror is Debian's archive for machines that name none.
const defaultMirror = "http://deb.debian.org/debian"

// debianSuites are the names under which machines use Debian's archive. A mirror of
// one has them all.
var debianSuites = [...]string{
	"bookworm", "bullseye", "trixie", "forky", "sid", "oldoldstable", "oldstable", "stable", "testing", "unstable",
}

// aptConfiguration is where a machine says which mirror of Debian's archive is its.
const aptConfiguration = "/etc/apt"

// Mirrors returns the mirrors of Debian's archive that this machine's apt uses, and
// then the default one.
func Mirrors() []string { return mirrors(aptConfiguration) }

// mirrors returns the mirrors of Debian's archive in the apt configuration of a
// directory, and then the default one. What cannot be read names none.
func mirrors(dir string) []string {
	names := []string{filepath.Join(dir, "sources.list")}
	for _, pattern := range [...]string{"*.list", "*.sources"} {
		more, err := filepath.Glob(filepath.Join(dir, "sources.list.d", pattern))
		if err == nil {
			names = append(names, more...)
		}
	}
	var found []string
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		parse := parseList
		if path.Ext(name) == ".sources" {
			parse = parseSources
		}
		for _, s := range parse(string(text)) {
			found = append(found, s.debian()...)
		}
	}
	var out []string
	for _, m := range append(found, defaultMirror) {
		if m = strings.TrimRight(m, "/"); !slices.Contains(out, m) {
			out = append(out, m)
		}
	}
	return out
}

// A source is one entry of apt's configuration, as sources.list(5) says.
type source struct {
	types, uris, suites, components []string
	signedBy                        string
	disabled                        bool
}

// debian returns the URIs of a source that is Debian's archive: by its suites, and,
// as others use their names too, by the keys that it is signed with. Only the
// schemes are among them that a package can be downloaded by.
func (s source) debian() []string {
	suite := func(name string) bool {
		base, pocket, _ := strings.Cut(name, "-")
		return slices.Contains(debianSuites[:], base) && (pocket == "" || pocket == "updates" || pocket == "backports")
	}
	theirs := s.signedBy != "" && !strings.HasPrefix(path.Base(s.signedBy), "debian-archive")
	if s.disabled || theirs || !slices.Contains(s.types, "deb") || !slices.Contains(s.components, "main") || !slices.ContainsFunc(s.suites, suite) {
		return nil
	}
	var out []string
	for _, uri := range s.uris {
		if strings.HasPrefix(uri, "http://") || strings.HasPrefix(uri, "https://") {
			out = append(out, uri)
		}
	}
	return out
}

// parseList reads the format of one line for each source:
//
//	deb [signed-by=FILE arch=amd64] URI SUITE COMPONENT...
func parseList(text string) []source {
	var out []source
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		var s source
		if before, rest, ok := strings.Cut(line, "["); ok {
			options, after, closed := strings.Cut(rest, "]")
			if !closed {
				continue
			}
			for option := range strings.FieldsSeq(options) {
				if key, value, _ := strings.Cut(option, "="); strings.EqualFold(key, "signed-by") {
					s.signedBy = value
				}
			}
			line = before + " " + after
		}
		words := strings.Fields(line)
		if len(words) < 3 {
			continue
		}
		s.types, s.uris, s.suites, s.components = words[:1], words[1:2], words[2:3], words[3:]
		out = append(out, s)
	}
	return out
}

// parseSources reads deb822, the format of a paragraph for each source. A line that
// begins with a blank goes on with the field above it.
func parseSources(text string) []source {
	var out []source
	fields := map[string]string{}
	end := func() {
		if len(fields) > 0 {
			out = append(out, source{
				types: strings.Fields(fields["types"]), uris: strings.Fields(fields["uris"]),
				suites: strings.Fields(fields["suites"]), components: strings.Fields(fields["components"]),
				signedBy: strings.TrimSpace(fields["signed-by"]),
				disabled: slices.Contains([]string{"no", "false", "0"}, strings.ToLower(strings.TrimSpace(fields["enabled"]))),
			})
		}
		fields = map[string]string{}
	}
	last := ""
	for line := range strings.Lines(text) {
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			end()
		case line[0] == ' ' || line[0] == '\t':
			fields[last] += line
		default:
			key, value, _ := strings.Cut(line, ":")
			last = strings.ToLower(key)
			fields[last] = value
		}
	}
	end()
	return out
}

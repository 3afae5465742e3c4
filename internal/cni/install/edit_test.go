// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// entry is a plugin's configuration as Config makes it.
var entry = []byte(`{"type":"smcr-cni","smcr.io/managed":true,"dataDir":"/run/kube-smcr"}`)

func mustList(t testing.TB, text []byte) list {
	t.Helper()
	l, err := parseList(text)
	must(t, err)
	return l
}

// typesOf are the plugins of a list in the eyes of libcni.
func typesOf(t testing.TB, text []byte) (out []string) {
	t.Helper()
	conf, err := libcni.NetworkConfFromBytes(text)
	must(t, err)
	for _, p := range conf.Plugins {
		out = append(out, p.Network.Type)
	}
	return out
}

// TestChain chains to the lists of well-known networks and undoes it.
func TestChain(t *testing.T) {
	paths, err := filepath.Glob("testdata/net.d/*.conflist")
	must(t, err)
	if len(paths) < 5 {
		t.Fatalf("only %d lists", len(paths))
	}
	for _, path := range paths {
		t.Run(filepath.Base(path), func(t *testing.T) {
			text, err := os.ReadFile(path)
			must(t, err)
			out, err := mustList(t, text).chain(entry)
			must(t, err)
			want := append(typesOf(t, text), "smcr-cni")
			if diff := cmp.Diff(want, typesOf(t, out)); diff != "" {
				t.Errorf("plugins: %s", diff)
			}
			// What was inserted is one piece; all else is byte for byte as it was.
			n := commonPrefix(text, out)
			if rest := text[n:]; !bytes.HasSuffix(out[n:], rest) {
				t.Errorf("changed more than one place:\n%s", out)
			}
			again, err := mustList(t, out).chain(entry)
			must(t, err)
			if diff := cmp.Diff(string(out), string(again)); diff != "" {
				t.Errorf("chained twice: %s", diff)
			}
			back, err := mustList(t, out).unchain()
			must(t, err)
			if diff := cmp.Diff(string(text), string(back)); diff != "" {
				t.Errorf("undone: %s", diff)
			}
		})
	}
}

func commonPrefix(a, b []byte) int {
	for i := range a {
		if i >= len(b) || a[i] != b[i] {
			return i
		}
	}
	return len(a)
}

func TestChain_indentation(t *testing.T) {
	text, err := os.ReadFile("testdata/net.d/10-flannel.conflist")
	must(t, err)
	out, err := mustList(t, text).chain(entry)
	must(t, err)
	want := strings.Replace(string(text), "        \"portMappings\": true\n      }\n    }\n", `        "portMappings": true
      }
    },
    {
      "type": "smcr-cni",
      "smcr.io/managed": true,
      "dataDir": "/run/kube-smcr"
    }
`, 1)
	if diff := cmp.Diff(want, string(out)); diff != "" {
		t.Error(diff)
	}
}

// lists in short: "a" is another's plugin, "o" an old entry of ours, "O" the
// current one, and "h" one that somebody chained by hand.
func short(t testing.TB, s string) []byte {
	t.Helper()
	texts := map[rune]string{
		'o': `{"type":"smcr-cni","smcr.io/managed":true,"dataDir":"/old"}`, 'O': string(entry),
		'h': `{"type":"smcr-cni","dataDir":"/by/hand"}`,
	}
	var parts []string
	for _, r := range s {
		text, ok := texts[r]
		if !ok {
			text = fmt.Sprintf(`{"type":%q}`, string(r))
		}
		parts = append(parts, text)
	}
	return fmt.Appendf(nil, `{"cniVersion":"1.0.0","name":"n","plugins":[%s]}`, strings.Join(parts, ", "))
}

func TestChain_positions(t *testing.T) {
	for _, tt := range []struct{ name, in, chained, unchained string }{
		{"new", "ab", "abO", "ab"},
		{"there", "abO", "abO", "ab"},
		{"another one chained behind it", "aOb", "aOb", "ab"},
		{"old settings", "ao", "aO", "a"},
		{"old settings in the middle", "aob", "aOb", "ab"},
		{"first, where it has no network", "oa", "aO", "a"},
		{"first and current", "Oab", "abO", "ab"},
		{"twice", "aOO", "aO", "a"},
		{"old ones everywhere", "oaobo", "abO", "ab"},
		{"by hand", "ah", "ah", "ah"},
		{"by hand and ours", "ahO", "ah", "ah"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := mustList(t, short(t, tt.in))
			got, err := l.chain(entry)
			must(t, err)
			if !sameJSON(short(t, tt.chained), got) {
				t.Errorf("chained: %s, want %s", got, tt.chained)
			}
			if l := mustList(t, got); !l.chained(entry) {
				t.Errorf("%s is not chained", got)
			}
			got, err = l.unchain()
			must(t, err)
			if !sameJSON(short(t, tt.unchained), got) {
				t.Errorf("unchained: %s, want %s", got, tt.unchained)
			}
		})
	}
	t.Run("alone", func(t *testing.T) {
		if _, err := mustList(t, short(t, "o")).chain(entry); err == nil || !strings.Contains(err.Error(), "no plugin but smcr-cni") {
			t.Errorf("error %v", err)
		}
	})
}

func TestParseList_refuses(t *testing.T) {
	for _, tt := range []struct{ name, text, want string }{
		{"empty", " \n", "is empty"},
		{"not JSON", "plugins: []", "is not JSON"},
		{"half written", `{"cniVersion":"1.0.0","plugins":[{"type":"bri`, "is not JSON: unexpected end"},
		{"something behind", string(short(t, "a")) + "}", "is not JSON"},
		{"a byte order mark", "\ufeff" + string(short(t, "a")), "is not JSON"},
		{"an array", `[]`, "cannot unmarshal array"},
		{"no name", `{"plugins":[{"type":"a"}]}`, "no name"},
		{"no plugins", `{"name":"n"}`, "no plugins of its own"},
		{"an empty list", `{"name":"n","plugins":[]}`, "no plugins in list"},
		{"plugins of another kind", `{"name":"n","plugins":{"type":"a"}}`, "invalid 'plugins' type"},
		{"a plugin without type", `{"name":"n","plugins":[{}]}`, "missing 'type'"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := parseList([]byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func TestUnsupported(t *testing.T) {
	for _, tt := range []struct {
		name, fields, want string
	}{
		{"as most networks", `"cniVersion":"0.3.1"`, ""},
		{"current", `"cniVersion":"1.1.0"`, ""},
		{"many", `"cniVersion":"1.0.0","cniVersions":["0.4.0","1.1.0"]`, ""},
		{"only many", `"cniVersions":["0.4.0","1.1.0"]`, ""},
		{"none", `"x":1`, "has no cniVersion"},
		{"too old", `"cniVersion":"0.2.0"`, "is of CNI 0.2.0, which has no chains"},
		{"too old for old runtimes", `"cniVersion":"0.2.0","cniVersions":["1.0.0"]`, "is of CNI 0.2.0"},
		{"later", `"cniVersion":"1.0.0","cniVersions":["9.9.9"]`, "offers CNI 9.9.9"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := mustList(t, []byte(`{"name":"n","plugins":[{"type":"a"}],`+tt.fields+`}`))
			got := ""
			if v, bad := unsupported(l.versions); bad {
				got = versionError(v).Error()
			}
			if tt.want == "" && got != "" || !strings.HasPrefix(got, tt.want) {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}

// FuzzChain: whatever runtimes accept is chained without loss, once, and undone
// without a trace.
func FuzzChain(f *testing.F) {
	paths, err := filepath.Glob("testdata/net.d/*.conf*")
	must(f, err)
	for _, p := range paths {
		text, err := os.ReadFile(p)
		must(f, err)
		f.Add(text)
	}
	for _, s := range []string{"ab", "oa", "aOO", "ahO", "aob", "o"} {
		f.Add(short(f, s))
	}
	f.Add([]byte(`{"plugins":[{"type":"x"}],"plugins":[{"type":"a","plugins":[1,2]},{"type":"b"}],"name":"n"}`))
	f.Add([]byte(`{"name":"n","plugins":[{"Type":"smcr-cni","smcr.io/managed":true},{"type":"b"}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		l, err := parseList(text)
		if err != nil {
			return
		}
		before, err := others(text)
		must(t, err)
		out, err := l.chain(entry)
		if err != nil {
			if !slices.ContainsFunc(l.plugins, func(p plugin) bool { return p.ours }) {
				t.Fatalf("chain: %v", err)
			}
			return
		}
		chained := mustList(t, out)
		if again, err := chained.chain(entry); err != nil || !bytes.Equal(again, out) {
			t.Errorf("chained twice: %v\n%s\n%s", err, out, again)
		}
		back, err := chained.unchain()
		must(t, err)
		after, err := others(back)
		must(t, err)
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("undone: %s", diff)
		}
		if !l.hasManaged() && !bytes.Equal(back, text) {
			t.Errorf("not the same bytes:\n%s\n%s", text, back)
		}
		if !slices.ContainsFunc(typesOf(t, out), func(s string) bool { return s == "smcr-cni" }) {
			t.Errorf("not chained: %s", out)
		}
	})
}

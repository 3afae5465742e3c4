// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func readTestdata(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata/net.d", name))
	must(t, err)
	return string(b)
}

// dir makes files as scan does, from names and texts.
func dir(pairs ...string) []file {
	var out []file
	for i := 0; i < len(pairs); i += 2 {
		name, link, _ := strings.Cut(pairs[i], " -> ")
		f := file{name: name, text: []byte(pairs[i+1]), link: link}
		if why, ok := strings.CutPrefix(pairs[i+1], "ERR "); ok {
			f.text, f.err = nil, errors.New(why)
		}
		f.parse()
		out = append(out, f)
	}
	slices.SortFunc(out, func(a, b file) int { return strings.Compare(a.name, b.name) })
	return out
}

// after are the plugins of each file after the changes of a decision, in short:
// "NAME: TYPES", with a derived list after its source.
func after(t testing.TB, files []file, d decision) []string {
	t.Helper()
	texts := map[string][]byte{}
	for _, f := range files {
		if f.err == nil {
			texts[f.name] = f.text
		}
	}
	for _, c := range d.changes {
		if c.new == nil {
			delete(texts, c.name)
			continue
		}
		texts[c.name] = c.new
	}
	var out []string
	for name, text := range texts {
		if filepath.Ext(name) == ".conflist" {
			out = append(out, name+": "+strings.Join(typesOf(t, text), " "))
		}
	}
	slices.Sort(out)
	return out
}

func TestDecide(t *testing.T) {
	kindnet, cilium := readTestdata(t, "10-kindnet.conflist"), readTestdata(t, "05-cilium.conf")
	chained := string(short(t, "aO"))
	derived := func(src, text string) string {
		f := dir(src, text)[0]
		out, err := derive(f, entry, nil)
		must(t, err)
		return string(out)
	}
	for _, tt := range []struct {
		name       string
		files      []file
		gone       bool // nothing of ours may stay
		unfinished bool
		state      State
		active     string
		detail     string
		changes    int
		after      []string
	}{
		{name: "no network yet", state: StateWaiting, detail: "no network is configured yet"},
		{
			name: "a list", files: dir("10-kindnet.conflist", kindnet), state: StateInstalled, active: "10-kindnet.conflist", changes: 1,
			after: []string{"10-kindnet.conflist: ptp portmap smcr-cni"},
		},
		{
			name: "chained already", files: dir("10-x.conflist", chained), state: StateInstalled, active: "10-x.conflist",
			after: []string{"10-x.conflist: a smcr-cni"},
		},
		{
			name: "the first of several", files: dir("87-podman.conflist", string(short(t, "p")), "10-kindnet.conflist", kindnet),
			state: StateInstalled, active: "10-kindnet.conflist", changes: 1,
			after: []string{"10-kindnet.conflist: ptp portmap smcr-cni", "87-podman.conflist: p"},
		},
		{
			name: "a network that is not the first any more", files: dir("87-podman.conflist", chained, "10-kindnet.conflist", kindnet),
			state: StateInstalled, active: "10-kindnet.conflist", changes: 2,
			after: []string{"10-kindnet.conflist: ptp portmap smcr-cni", "87-podman.conflist: a"},
		},
		{
			name: "chained by hand elsewhere", files: dir("87-x.conflist", string(short(t, "ah")), "10-kindnet.conflist", kindnet),
			state: StateInstalled, active: "10-kindnet.conflist", changes: 1,
			after: []string{"10-kindnet.conflist: ptp portmap smcr-cni", "87-x.conflist: a smcr-cni"},
		},
		{
			name: "a single plugin", files: dir("05-cilium.conf", cilium), state: StateInstalled, active: "05-cilium-kube-smcr.conflist", changes: 1,
			after: []string{"05-cilium-kube-smcr.conflist: cilium-cni smcr-cni"},
		},
		{
			name: "a single plugin, done", files: dir("05-cilium.conf", cilium, "05-cilium-kube-smcr.conflist", derived("05-cilium.conf", cilium)),
			state: StateInstalled, active: "05-cilium-kube-smcr.conflist",
			after: []string{"05-cilium-kube-smcr.conflist: cilium-cni smcr-cni"},
		},
		{
			name: "a single plugin that changed",
			files: dir("05-cilium.conf", strings.Replace(cilium, "cilium-cni", "other-cni", 1),
				"05-cilium-kube-smcr.conflist", derived("05-cilium.conf", cilium)),
			state: StateInstalled, active: "05-cilium-kube-smcr.conflist", changes: 1,
			after: []string{"05-cilium-kube-smcr.conflist: other-cni smcr-cni"},
		},
		{
			name: "another one chained to a derived list, whose source changed",
			files: dir("05-cilium.conf", strings.Replace(cilium, "cilium-cni", "other-cni", 1), "05-cilium-kube-smcr.conflist",
				strings.Replace(derived("05-cilium.conf", cilium), "\n  ]", ",{\"type\":\"istio-cni\"}\n  ]", 1)),
			state: StateInstalled, active: "05-cilium-kube-smcr.conflist", changes: 1,
			after: []string{"05-cilium-kube-smcr.conflist: other-cni smcr-cni istio-cni"},
		},
		{
			name: "a single plugin that is gone", files: dir("05-cilium-kube-smcr.conflist", derived("05-cilium.conf", cilium)),
			state: StateWaiting, detail: "no network", changes: 1,
		},
		{
			name:  "a single plugin and its owner's list",
			files: dir("05-cilium-kube-smcr.conflist", derived("05-cilium.conf", cilium), "05-cilium.conflist", readTestdata(t, "05-cilium.conflist")),
			state: StateInstalled, active: "05-cilium.conflist", changes: 2, after: []string{"05-cilium.conflist: cilium-cni smcr-cni"},
		},
		{
			name: "a symbolic link", files: dir("10-x.conflist -> /elsewhere/x", kindnet), state: StateInstalled,
			active: "10-x-kube-smcr.conflist", changes: 1,
			after: []string{"10-x-kube-smcr.conflist: ptp portmap smcr-cni", "10-x.conflist: ptp portmap"},
		},
		{
			name: "a link to a derived list", files: dir("10-x.conflist -> 20-y", derived("05-cilium.conf", cilium)), state: StateBroken,
			active: "10-x-kube-smcr.conflist", detail: "is itself derived", after: []string{"10-x.conflist: cilium-cni smcr-cni"},
		},
		{
			name: "half written", files: dir("10-kindnet.conflist", kindnet[:100], "87-podman.conflist", string(short(t, "p"))), unfinished: true,
			state: StateWaiting, detail: "10-kindnet.conflist is not JSON", after: []string{"87-podman.conflist: p"},
		},
		{
			name: "not JSON for long", files: dir("10-kindnet.conflist", "junk"), state: StateBroken, detail: "10-kindnet.conflist is not JSON",
		},
		{
			name: "not JSON for long, and another one", files: dir("10-kindnet.conflist", "junk", "87-podman.conflist", string(short(t, "p"))),
			state: StateInstalled, active: "87-podman.conflist", detail: "stop at a file that is not valid; correct or remove: 10-kindnet.conflist", changes: 1,
			after: []string{"87-podman.conflist: p smcr-cni"},
		},
		{
			name: "not JSON behind the first", files: dir("10-x.conflist", chained, "20-y.conflist", "junk"), unfinished: true,
			state: StateInstalled, active: "10-x.conflist", after: []string{"10-x.conflist: a smcr-cni"},
		},
		{name: "not readable", files: dir("10-x.conflist", "ERR has more than 5 bytes"), state: StateBroken, detail: "10-x.conflist has more than 5 bytes"},
		{
			name: "a list in a .conf", files: dir("10-x.conf", kindnet), state: StateBroken, detail: "10-x.conf is a list of plugins",
		},
		{
			name: "a version without chains", files: dir("10-x.conflist", strings.Replace(chained, "1.0.0", "0.2.0", 1)), state: StateBroken,
			active: "10-x.conflist", detail: "CNI 0.2.0, which has no chains", changes: 1, after: []string{"10-x.conflist: a"},
		},
		{
			name: "only ours", files: dir("10-x.conflist", string(short(t, "O"))), state: StateBroken, active: "10-x.conflist",
			detail: "no plugin but smcr-cni", after: []string{"10-x.conflist: smcr-cni"},
		},
		{
			name: "all undone", gone: true, unfinished: true,
			files: dir("05-cilium.conf", cilium, "05-cilium-kube-smcr.conflist", derived("05-cilium.conf", cilium), "10-x.conflist", chained,
				"15-h.conflist", string(short(t, "ah")), "20-y.conflist", "junk", "87-podman.conflist", string(short(t, "aob"))),
			state: StateWaiting, changes: 3,
			after: []string{"10-x.conflist: a", "15-h.conflist: a smcr-cni", "87-podman.conflist: a b"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := goal{entry: entry, unfinished: func(string) bool { return tt.unfinished }}
			if tt.gone {
				w.entry = nil
			}
			d := decide(tt.files, w)
			if d.state != tt.state || d.active != tt.active || !strings.Contains(d.detail, tt.detail) || tt.detail == "" && tt.state == StateInstalled && d.detail != "" {
				t.Errorf("state %s, active %q, detail %q; want %s, %q, %q", d.state, d.active, d.detail, tt.state, tt.active, tt.detail)
			}
			if len(d.changes) != tt.changes {
				t.Errorf("%d changes, want %d", len(d.changes), tt.changes)
			}
			if diff := cmp.Diff(tt.after, after(t, tt.files, d)); diff != "" {
				t.Error(diff)
			}
			if tt.state != StateInstalled || tt.changes == 0 {
				return
			}
			var next []string
			texts := map[string]string{}
			for _, f := range tt.files {
				texts[f.name] = string(f.text)
			}
			for _, c := range d.changes {
				if texts[c.name] = string(c.new); c.new == nil {
					delete(texts, c.name)
				}
			}
			for name, text := range texts {
				if f := slices.IndexFunc(tt.files, func(f file) bool { return f.name == name && f.link != "" }); f >= 0 {
					name += " -> " + tt.files[f].link
				}
				next = append(next, name, text)
			}
			if d := decide(dir(next...), w); len(d.changes) > 0 {
				t.Errorf("not done at once: %s", d.changes[0].new)
			}
		})
	}
}

// TestDerivedName makes sure that runtimes take a derived list first.
func TestDerivedName(t *testing.T) {
	for _, name := range []string{"05-cilium.conf", "x.json", "10-a.conflist", ".conf", "a.b.conf"} {
		if d := derivedName(name); d >= name {
			t.Errorf("%q does not sort before %q", d, name)
		}
	}
}

func TestNewerEntry(t *testing.T) {
	text := strings.Replace(string(short(t, "ao")), `"dataDir":"/old"`, `"dataDir":"/old","later":1`, 1)
	if d := decide(dir("10-x.conflist", text), goal{entry: entry, unfinished: never}); !d.newer {
		t.Error("a field of a later version is not noticed")
	}
	if d := decide(dir("10-x.conflist", string(short(t, "ao"))), goal{entry: entry, unfinished: never}); d.newer {
		t.Error("an entry of this version is taken for a later one's")
	}
}

// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/smcr-io/kube-smcr/internal/cni"
)

// managedKey marks an element that this package wrote, and may change and remove. CNI
// leaves keys with a domain to the domain's owner.
const managedKey = "smcr.io/managed"

// A span is a part of a text.
type span struct{ from, to int }

// A plugin is one element of a list.
type plugin struct {
	span
	ours    bool // of our type
	managed bool // and written by us
}

// A list is a configuration list, with the position of each plugin in its text.
type list struct {
	text     []byte
	name     string
	versions []string // the versions of CNI that a runtime may choose from
	plugins  []plugin
}

// parseList reads a configuration list and accepts what container runtimes
// accept.
func parseList(text []byte) (list, error) {
	conf, err := libcni.NetworkConfFromBytes(text)
	if err != nil {
		return list{}, jsonError(text, err)
	}
	if len(conf.Plugins) == 0 {
		return list{}, errors.New("has no plugins of its own: it loads them from the directory of its name, so put smcr-cni there by hand")
	}
	l := list{text: text, name: conf.Name}
	spans, err := locatePlugins(text)
	if err != nil {
		return list{}, err
	}
	if len(spans) != len(conf.Plugins) {
		return list{}, fmt.Errorf("has %d plugins and reads as %d", len(spans), len(conf.Plugins))
	}
	for i, s := range spans {
		p := plugin{span: s, ours: conf.Plugins[i].Network.Type == cni.PluginType}
		p.managed = p.ours && isManaged(text[s.from:s.to])
		l.plugins = append(l.plugins, p)
	}
	l.versions, err = readVersions(text)
	return l, err
}

// readVersions returns the versions of CNI that a runtime may choose from: those of
// cniVersions, and cniVersion, which is all that older runtimes read.
func readVersions(text []byte) ([]string, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return nil, fmt.Errorf("read its fields: %w", err)
	}
	var one string
	var many []string
	for name, dst := range map[string]any{"cniVersion": &one, "cniVersions": &many} {
		if raw, ok := fields[name]; ok {
			if err := json.Unmarshal(raw, dst); err != nil {
				return nil, fmt.Errorf("read its %s: %w", name, err)
			}
		}
	}
	if one != "" || len(many) == 0 {
		many = append(many, one)
	}
	return many, nil
}

// jsonError says what is wrong with a text that libcni refuses, and first whether
// it is JSON at all.
func jsonError(text []byte, err error) error {
	var se *json.SyntaxError
	switch {
	case len(bytes.TrimSpace(text)) == 0:
		return errors.New("is empty")
	case errors.As(err, &se):
		return fmt.Errorf("is not JSON: %w at byte %d", se, se.Offset)
	}
	return errors.New(strings.TrimPrefix(err.Error(), "error parsing configuration list: "))
}

func isManaged(text []byte) bool {
	var m map[string]any
	return json.Unmarshal(text, &m) == nil && managedEntry(m)
}

func managedEntry(m map[string]any) bool { return m["type"] == cni.PluginType && m[managedKey] == true }

// locatePlugins returns the position of each element of the list's plugins. If the text
// has several keys plugins, the last one counts, as it does for encoding/json.
func locatePlugins(text []byte) ([]span, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	if err := expect(d, '{'); err != nil {
		return nil, err
	}
	var spans []span
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, err
		}
		if key != "plugins" {
			if _, err := nextValue(d, text); err != nil {
				return nil, err
			}
			continue
		}
		spans = nil
		if err := expect(d, '['); err != nil {
			return nil, err
		}
		for d.More() {
			s, err := nextValue(d, text)
			if err != nil {
				return nil, err
			}
			spans = append(spans, s)
		}
		if err := expect(d, ']'); err != nil {
			return nil, err
		}
	}
	return spans, expect(d, '}')
}

func expect(d *json.Decoder, want json.Delim) error {
	t, err := d.Token()
	if err != nil {
		return err
	}
	if t != want {
		return fmt.Errorf("has %v at byte %d, want %v", t, d.InputOffset(), want)
	}
	return nil
}

func nextValue(d *json.Decoder, text []byte) (span, error) {
	var raw json.RawMessage
	if err := d.Decode(&raw); err != nil {
		return span{}, err
	}
	end := int(d.InputOffset())
	s := span{end - len(raw), end}
	if s.from < 0 || !bytes.Equal(text[s.from:s.to], raw) {
		return span{}, fmt.Errorf("cannot find a value at byte %d", end)
	}
	return s, nil
}

// unsupported returns the first version that the plugin does not support; found is false
// if it supports all.
func unsupported(versions []string) (_ string, found bool) {
	speaks := cni.Versions().SupportedVersions()
	i := slices.IndexFunc(versions, func(v string) bool { return !slices.Contains(speaks, v) })
	if i < 0 {
		return "", false
	}
	return versions[i], true
}

// versionError says what to do about a version of CNI that the plugin does not support.
func versionError(v string) error {
	speaks := cni.Versions().SupportedVersions()
	if v == "" {
		return fmt.Errorf("has no cniVersion, which means 0.1.0, and that has no chains: set cniVersion to one of %s", strings.Join(speaks, ", "))
	}
	if later, err := version.GreaterThan(v, speaks[len(speaks)-1]); err == nil && later {
		return fmt.Errorf("offers CNI %s, which this smcr-cni does not speak (%s): update kube-smcr", v, strings.Join(speaks, ", "))
	}
	return fmt.Errorf("is of CNI %s, which has no chains that smcr-cni could join: set cniVersion to one of %s", v, strings.Join(speaks, ", "))
}

// chained tells whether the plugin is in the list as it should be: once, and as entry if
// this package put it there. An element that somebody else wrote may be different.
func (l list) chained(entry []byte) bool {
	n, good := 0, false
	for i, p := range l.plugins {
		switch {
		case p.managed:
			n++
			good = i > 0 && sameJSON(l.text[p.from:p.to], entry)
		case p.ours:
			n++
			good = true
		}
	}
	return n == 1 && good
}

// hasManaged tells whether the list has an element that this package wrote.
func (l list) hasManaged() bool {
	return slices.ContainsFunc(l.plugins, func(p plugin) bool { return p.managed })
}

// hasNewer tells whether our element has a field that this version of the plugin does
// not know: a later version wrote it.
func (l list) hasNewer() bool {
	for _, p := range l.plugins {
		var m map[string]json.RawMessage
		if !p.managed || json.Unmarshal(l.text[p.from:p.to], &m) != nil {
			continue
		}
		for k := range m {
			if !cni.KnowsField(k) {
				return true
			}
		}
	}
	return false
}

// dropped are the fields that our element has in the text of one list, and not in that of
// another one which has our element, too.
func dropped(before, after []byte) (out []string) {
	was, is := managedFields(before), managedFields(after)
	if is == nil {
		return nil
	}
	for k := range was {
		if _, ok := is[k]; !ok {
			out = append(out, k)
		}
	}
	slices.Sort(out)
	return out
}

// managedFields are the fields of our first element in the text of a list; nil if there is none.
func managedFields(text []byte) (fields map[string]json.RawMessage) {
	l, err := parseList(text)
	if err != nil {
		return nil
	}
	for _, p := range l.plugins {
		if p.managed && json.Unmarshal(text[p.from:p.to], &fields) == nil {
			return fields
		}
	}
	return nil
}

// chain returns the list's text with entry in it: in the place of our element if there is
// one, else at the end. No other byte changes.
func (l list) chain(entry []byte) ([]byte, error) {
	if l.chained(entry) {
		return l.text, nil
	}
	if slices.ContainsFunc(l.plugins, func(p plugin) bool { return p.ours && !p.managed }) {
		return l.unchain() // somebody else's element of the plugin stays
	}
	i := slices.IndexFunc(l.plugins, func(p plugin) bool { return p.managed })
	if i > 0 {
		p := l.plugins[i]
		out := splice(l.text, p.span, indent(entry, l.gap(i)))
		next, err := parseList(out)
		if err != nil {
			return nil, err
		}
		if extra := next.plugins[i+1:]; slices.ContainsFunc(extra, func(p plugin) bool { return p.managed }) {
			if out, err = next.without(func(j int, p plugin) bool { return j > i && p.managed }); err != nil {
				return nil, err
			}
		}
		return out, l.verify(out)
	}
	base := l
	if i == 0 {
		text, err := l.unchain()
		if err != nil {
			return nil, err
		}
		if base, err = parseList(text); err != nil {
			return nil, err
		}
	}
	last := len(base.plugins) - 1
	gap := base.gap(last)
	end := base.plugins[last].to
	out := splice(base.text, span{end, end}, slices.Concat([]byte(","), gap, indent(entry, gap)))
	return out, l.verify(out)
}

// unchain returns the list's text without our entries.
func (l list) unchain() ([]byte, error) {
	out, err := l.without(func(_ int, p plugin) bool { return p.managed })
	if err != nil {
		return nil, err
	}
	return out, l.verify(out)
}

// without cuts elements out, each with one comma.
func (l list) without(cut func(int, plugin) bool) ([]byte, error) {
	kept := 0
	for i, p := range l.plugins {
		if !cut(i, p) {
			kept++
		}
	}
	if kept == 0 {
		return nil, errors.New("has no plugin but smcr-cni: it makes no interface; remove the file or add the network's plugin")
	}
	out := slices.Clone(l.text)
	for i, p := range slices.Backward(l.plugins) {
		switch {
		case !cut(i, p):
		case i > 0:
			out = slices.Delete(out, l.plugins[i-1].to, p.to)
		default:
			// The elements after this one were cut before, the last first, so that the
			// second element of out is the first that stays.
			next, err := locatePlugins(out)
			if err != nil {
				return nil, err
			}
			out = slices.Delete(out, next[0].from, next[1].from)
		}
	}
	return out, nil
}

// gap is the white space before an element.
func (l list) gap(i int) []byte {
	from := l.plugins[i].from
	n := len(bytes.TrimRight(l.text[:from], " \t\r\n"))
	return l.text[n:from]
}

// indent formats entry like the elements around it: on one line, or on several with the
// same indentation.
func indent(entry, gap []byte) []byte {
	i := bytes.LastIndexByte(gap, '\n')
	if i < 0 {
		return entry
	}
	prefix := string(gap[i+1:])
	step := "  "
	if strings.HasPrefix(prefix, "\t") {
		step = "\t"
	}
	var b bytes.Buffer
	if err := json.Indent(&b, entry, prefix, step); err != nil {
		return entry
	}
	return b.Bytes()
}

func splice(text []byte, s span, with []byte) []byte {
	return slices.Concat(text[:s.from], with, text[s.to:])
}

// verify makes sure that out differs from the list in nothing but our elements: the file
// belongs to another program.
func (l list) verify(out []byte) error {
	a, err := others(l.text)
	if err != nil {
		return err
	}
	b, err := others(out)
	if err != nil {
		return err
	}
	if !reflect.DeepEqual(a, b) {
		return errors.New("would change in more than smcr-cni: please report this file")
	}
	if _, err := parseList(out); err != nil {
		return fmt.Errorf("would not be valid any more: %w", err)
	}
	return nil
}

// others is the content of a list without our elements. Numbers stay as written.
func others(text []byte) (map[string]any, error) {
	var m map[string]any
	if err := decodeNumbers(text, &m); err != nil {
		return nil, err
	}
	plugins, _ := m["plugins"].([]any)
	m["plugins"] = slices.DeleteFunc(plugins, func(p any) bool {
		o, _ := p.(map[string]any)
		return managedEntry(o)
	})
	return m, nil
}

func decodeNumbers(text []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("has something behind its end")
	}
	return nil
}

func sameJSON(a, b []byte) bool {
	var x, y any
	return decodeNumbers(a, &x) == nil && decodeNumbers(b, &y) == nil && reflect.DeepEqual(x, y)
}

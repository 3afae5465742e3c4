// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/libcni"
)

const (
	// derivedSuffix ends the names of derived lists. A hyphen sorts before a dot, so
	// 10-net-kube-smcr.conflist sorts right before its source 10-net.conf.
	derivedSuffix = "-kube-smcr.conflist"
	// derivedKey is the key of a derived list that names its source.
	derivedKey = "smcr.io/derivedFrom"
)

// A source names the file that a list was derived from, and the content of that file.
type source struct {
	File   string `json:"file"`
	SHA256 string `json:"sha256"`
}

func sourceOf(f file) source {
	sum := sha256.Sum256(f.text)
	return source{File: f.name, SHA256: hex.EncodeToString(sum[:])}
}

// derivedName is the name of the list that is derived from a file.
func derivedName(name string) string {
	return strings.TrimSuffix(name, filepath.Ext(name)) + derivedSuffix
}

// parseDerived returns the source of a derived list; ok is false for any other file.
func parseDerived(f file) (_ source, ok bool) {
	if !strings.HasSuffix(f.name, derivedSuffix) || f.link != "" {
		return source{}, false
	}
	var fields map[string]json.RawMessage
	var s source
	if json.Unmarshal(f.text, &fields) != nil || json.Unmarshal(fields[derivedKey], &s) != nil {
		return source{}, false
	}
	return s, s.File != "" && derivedName(s.File) == f.name
}

// A single is a configuration of one plugin, the content of a .conf or .json file.
type single struct {
	text     []byte
	name     string
	versions []string
}

// parseSingle reads a configuration of one plugin. It accepts what container runtimes
// accept, except a configuration without a name: the derived list needs the name.
func parseSingle(text []byte) (single, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(text, &fields); err != nil {
		return single{}, jsonError(text, err)
	}
	if _, ok := fields["plugins"]; ok {
		return single{}, errors.New("is a list of plugins: name it .conflist")
	}
	conf, err := libcni.NetworkPluginConfFromBytes(text)
	if err != nil {
		return single{}, errors.New(strings.TrimPrefix(err.Error(), "error parsing configuration: "))
	}
	if conf.Network.Name == "" {
		return single{}, errors.New("has no name, which a list needs")
	}
	v, err := readVersions(text)
	return single{text: text, name: conf.Network.Name, versions: v}, err
}

// derive makes a list of f's plugins with entry behind them. old is the list that was
// derived before, or nil; plugins that other programs chained to old come behind entry.
func derive(f file, entry []byte, old *file) ([]byte, error) {
	if bytes.Contains(f.text, []byte(derivedKey)) {
		return nil, errors.New("is itself derived from another file")
	}
	own, err := f.ownList()
	if err != nil {
		return nil, err
	}
	l, err := parseList(own)
	if err != nil {
		return nil, err
	}
	out, err := l.chain(entry)
	if err != nil {
		return nil, err
	}
	for _, raw := range chainedBehind(old) {
		if l, err = parseList(out); err != nil {
			return nil, err
		}
		end := l.plugins[len(l.plugins)-1].to
		out = splice(out, span{end, end}, append([]byte(","), raw...))
	}
	mark, err := json.Marshal(sourceOf(f))
	if err != nil {
		return nil, err
	}
	at := bytes.IndexByte(out, '{') + 1
	out = splice(out, span{at, at}, fmt.Appendf(nil, "\n  %q: %s,", derivedKey, mark))
	_, err = parseList(out)
	return out, err
}

// ownList is a list of the file's plugins, without ours.
func (f *file) ownList() ([]byte, error) {
	if f.single == nil {
		l, err := parseList(f.text)
		if err != nil {
			return nil, err
		}
		return l.unchain()
	}
	name, err := json.Marshal(f.single.name)
	if err != nil {
		return nil, err
	}
	version, err := json.Marshal(f.single.versions[len(f.single.versions)-1])
	if err != nil {
		return nil, err
	}
	plugin := bytes.TrimSpace(f.single.text)
	return fmt.Appendf(nil, "{\n  \"cniVersion\": %s,\n  \"name\": %s,\n  \"plugins\": [\n    %s\n  ]\n}\n",
		version, name, bytes.ReplaceAll(plugin, []byte("\n"), []byte("\n    "))), nil
}

// chainedBehind returns the text of each plugin that another program put behind ours in
// a derived list.
func chainedBehind(old *file) (out [][]byte) {
	if old == nil {
		return nil
	}
	l, err := parseList(old.text)
	if err != nil {
		return nil
	}
	behind := false
	for _, p := range l.plugins {
		if behind && !p.managed {
			out = append(out, old.text[p.from:p.to])
		}
		behind = behind || p.managed
	}
	return out
}

// upToDate tells whether old was derived from f as it is now, and has entry.
func upToDate(old *file, f file, entry []byte) bool {
	if old == nil {
		return false
	}
	s, ok := parseDerived(*old)
	if !ok || s != sourceOf(f) {
		return false
	}
	l, err := parseList(old.text)
	return err == nil && l.chained(entry)
}

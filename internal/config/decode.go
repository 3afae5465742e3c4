// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/api/resource"
)

// errSize is what is wrong with a size.
var errSize = errors.New("want a size such as 256KiB, 64Mi or 1.5Gi")

// decoder walks a YAML tree and collects mistakes. It is owned by one call of
// Parse.
type decoder struct {
	file    string
	machine Machine
	errs    Errors
	hosts   []field // of Node.HostPods, in the order of the file
}

// field is a node of the file and the path that leads to it.
type field struct {
	path string
	node *yaml.Node
}

func (d *decoder) errorf(f field, format string, args ...any) {
	if len(d.errs) >= maxErrors {
		return
	}
	d.errs = append(d.errs, &FieldError{
		File: d.file, Line: f.node.Line, Column: f.node.Column,
		Field: f.path, Problem: fmt.Sprintf(format, args...),
	})
}

func (d *decoder) sorted() error {
	if len(d.errs) == 0 {
		return nil
	}
	slices.SortStableFunc(d.errs, func(a, b *FieldError) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return d.errs
}

// renamed are fields of earlier versions of the product, with their present form.
var renamed = [...]struct{ old, now string }{
	{"node.device", "node.devices now, and is a list: devices: [{soft: {address: ADDRESS}}]"},
}

// fields are the entries of a mapping, by key.
type fields struct {
	self field
	at   map[string]field
}

// mapping reads f as a mapping, in which only these keys are allowed.
func (d *decoder) mapping(f field, keys ...string) fields {
	fs := fields{self: f, at: map[string]field{}}
	if f.node.Kind != yaml.MappingNode {
		d.errorf(f, "is %s, want a mapping of %s", kind(f.node), strings.Join(keys, ", "))
		return fs
	}
	for i := 0; i+1 < len(f.node.Content); i += 2 {
		key, value := f.node.Content[i], f.node.Content[i+1]
		kf := field{path: join(f.path, key.Value), node: key}
		switch old := slices.IndexFunc(renamed[:], func(r struct{ old, now string }) bool { return r.old == kf.path }); {
		case old >= 0:
			d.errorf(kf, "is called %s", renamed[old].now)
			fs.at[key.Value] = kf
		case key.Kind != yaml.ScalarNode || !slices.Contains(keys, key.Value):
			d.errorf(kf, "unknown field%s; known here: %s", didYouMean(key.Value, keys), strings.Join(keys, ", "))
		case fs.has(key.Value):
			d.errorf(kf, "is given twice")
		default:
			fs.at[key.Value] = field{path: kf.path, node: value}
		}
	}
	return fs
}

func (fs fields) has(key string) bool { _, ok := fs.at[key]; return ok }

// get returns a field; ok is false if it is missing or null.
func (fs fields) get(key string) (_ field, ok bool) {
	f, ok := fs.at[key]
	return f, ok && f.node.Tag != "!!null"
}

// where returns the field, or, if it is missing, the mapping under the field's path: the
// place in the file that an error is about.
func (fs fields) where(key string) field {
	if f, ok := fs.at[key]; ok {
		return f
	}
	return field{path: join(fs.self.path, key), node: fs.self.node}
}

// list reads a sequence.
func (d *decoder) list(f field) []field {
	if f.node.Kind != yaml.SequenceNode {
		d.errorf(f, "is %s, want a list", kind(f.node))
		return nil
	}
	if len(f.node.Content) > maxListItems {
		d.errorf(f, "has %d entries, at most %d are allowed", len(f.node.Content), maxListItems)
		return nil
	}
	out := make([]field, len(f.node.Content))
	for i, n := range f.node.Content {
		out[i] = field{path: fmt.Sprintf("%s[%d]", f.path, i), node: n}
	}
	return out
}

// scalar returns the text of a scalar. It refuses aliases: an error in one would have
// several places in the file.
func (d *decoder) scalar(f field, want string) (string, bool) {
	if f.node.Kind != yaml.ScalarNode {
		d.errorf(f, "is %s, want %s", kind(f.node), want)
		return "", false
	}
	return f.node.Value, true
}

func (d *decoder) text(fs fields, key string, into *string) {
	if f, ok := fs.get(key); ok {
		if s, ok := d.scalar(f, "a text"); ok {
			*into = s
		}
	}
}

func (d *decoder) boolean(fs fields, key string, into *bool) {
	f, ok := fs.get(key)
	if !ok {
		return
	}
	s, ok := d.scalar(f, "true or false")
	switch {
	case !ok:
	case s == "true" || s == "false":
		*into = s == "true"
	default:
		d.errorf(f, "%q, want true or false", s)
	}
}

func (d *decoder) integer(fs fields, key string, into *int, low, high int) {
	f, ok := fs.get(key)
	if !ok {
		return
	}
	s, ok := d.scalar(f, "a number")
	if !ok {
		return
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < low || n > high {
		d.errorf(f, "%q, want a number from %d to %d", s, low, high)
		return
	}
	*into = n
}

func (d *decoder) size(fs fields, key string, into *int) {
	f, ok := fs.get(key)
	if !ok {
		return
	}
	s, ok := d.scalar(f, "a size such as 256KiB")
	if !ok {
		return
	}
	n, err := parseSize(s)
	if err != nil {
		d.errorf(f, "%q: %v", s, err)
		return
	}
	*into = n
}

func (d *decoder) duration(fs fields, key string, into *time.Duration, low, high time.Duration) {
	f, ok := fs.get(key)
	if !ok {
		return
	}
	s, ok := d.scalar(f, "a duration such as 30s")
	if !ok {
		return
	}
	v, err := time.ParseDuration(s)
	if err != nil || v < low || v > high {
		d.errorf(f, "%q, want a duration such as 30s, from %v to %v", s, low, high)
		return
	}
	*into = v
}

// choice reads one of several words and returns its index.
func (d *decoder) choice(fs fields, key string, words ...string) int {
	f, ok := fs.get(key)
	if !ok {
		return 0
	}
	s, ok := d.scalar(f, "one of "+strings.Join(words, ", "))
	if !ok {
		return 0
	}
	i := slices.Index(words, s)
	if i < 0 {
		d.errorf(f, "%q, want one of %s", s, strings.Join(words, ", "))
		return 0
	}
	return i
}

func (d *decoder) prefixes(fs fields, key string) []netip.Prefix {
	f, ok := fs.get(key)
	if !ok {
		return nil
	}
	var out []netip.Prefix
	for _, item := range d.list(f) {
		s, ok := d.scalar(item, "a CIDR such as 10.0.0.0/8")
		if !ok {
			continue
		}
		p, err := netip.ParsePrefix(s)
		if err != nil {
			if a, aerr := netip.ParseAddr(s); aerr == nil && a.Zone() == "" {
				p, err = a.Prefix(a.BitLen())
			}
		}
		switch {
		case err != nil:
			d.errorf(item, "%q, want a CIDR such as 10.0.0.0/8 or an address", s)
		case p.Addr().Is4In6():
			d.errorf(item, "%q is IPv4 written as IPv6: write it as IPv4", s)
		case p != p.Masked():
			d.errorf(item, "%q has bits set behind its length: did you mean %v?", s, p.Masked())
		default:
			if i := slices.IndexFunc(out, p.Overlaps); i >= 0 {
				d.errorf(item, "%v overlaps with %v of the same list", p, out[i])
			}
			out = append(out, p)
		}
	}
	return out
}

func (d *decoder) ports(fs fields, key string) []PortRange {
	f, ok := fs.get(key)
	if !ok {
		return nil
	}
	var out []PortRange
	for _, item := range d.list(f) {
		s, ok := d.scalar(item, "a port or a range such as 8000-8100")
		if !ok {
			continue
		}
		r, err := parsePorts(s)
		if err != nil {
			d.errorf(item, "%q: %v", s, err)
			continue
		}
		for _, o := range out {
			if max(o.First, r.First) <= min(o.Last, r.Last) {
				d.errorf(item, "%q overlaps with %v of the same list", s, o)
				break
			}
		}
		out = append(out, r)
	}
	return out
}

// patterns reads a list of names in which * stands for any characters.
func (d *decoder) patterns(fs fields, key string) []string {
	f, ok := fs.get(key)
	if !ok {
		return nil
	}
	var out []string
	for _, item := range d.list(f) {
		s, ok := d.scalar(item, "a name, in which * stands for any characters")
		switch {
		case !ok:
		case !validName(s, "*"):
			d.errorf(item, "%q, want a name of letters, digits, '-', '_' and '.', in which * stands for any characters", s)
		case slices.Contains(out, s):
			d.errorf(item, "%q is given twice", s)
		default:
			out = append(out, s)
		}
	}
	return out
}

// validName says whether s has only characters of the names of objects, devices and
// interfaces, or of also.
func validName(s, also string) bool {
	if s == "" || len(s) > maxNameLen {
		return false
	}
	for _, r := range s {
		ok := 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' ||
			strings.ContainsRune("-_.", r) || strings.ContainsRune(also, r)
		if !ok {
			return false
		}
	}
	return true
}

func parsePorts(s string) (PortRange, error) {
	first, last, isRange := strings.Cut(s, "-")
	if !isRange {
		last = first
	}
	a, err1 := strconv.ParseUint(strings.TrimSpace(first), 10, 16)
	b, err2 := strconv.ParseUint(strings.TrimSpace(last), 10, 16)
	switch {
	case err1 != nil || err2 != nil || a == 0 || b == 0:
		return PortRange{}, fmt.Errorf("want a port from 1 to 65535 or a range such as 8000-8100")
	case a > b:
		return PortRange{}, fmt.Errorf("runs backwards: did you mean %d-%d?", b, a)
	}
	return PortRange{uint16(a), uint16(b)}, nil
}

// maxSize bounds a size, so that sums of sizes do not overflow.
const maxSize = math.MaxInt64 >> 10

// parseSize reads a number of bytes with an optional unit of KiB, MiB or GiB, or a
// quantity of Kubernetes: 64Mi, 1.5Gi, 2G. Parts of a byte are rounded up.
func parseSize(s string) (int, error) {
	for unit, shift := range map[string]int{"KiB": 10, "MiB": 20, "GiB": 30} {
		num, ok := strings.CutSuffix(s, unit)
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(strings.TrimSpace(num), 10, 64)
		if err != nil || n < 0 || n > maxSize>>shift {
			return 0, errSize
		}
		return int(n << shift), nil
	}
	q, err := resource.ParseQuantity(s)
	if err != nil || q.Sign() < 0 || q.CmpInt64(maxSize) > 0 {
		return 0, errSize
	}
	return int(q.Value()), nil
}

func (r PortRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func kind(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias, which is not supported"
	case yaml.ScalarNode:
		if n.Tag == "!!null" {
			return "empty"
		}
		return "a single value"
	case yaml.DocumentNode:
	}
	return "empty"
}

// didYouMean finds the known key that differs in case or by one character.
func didYouMean(s string, keys []string) string {
	for _, k := range keys {
		if strings.EqualFold(k, s) || nearly(k, s) {
			return fmt.Sprintf(" (did you mean %s?)", k)
		}
	}
	return ""
}

// nearly says whether one insertion, deletion or replacement turns a into b.
func nearly(a, b string) bool {
	i := 0
	for i < len(a) && i < len(b) && a[i] == b[i] {
		i++
	}
	a, b = a[i:], b[i:]
	switch len(a) - len(b) {
	case 0:
		return len(a) > 0 && a[1:] == b[1:]
	case 1:
		return a[1:] == b
	case -1:
		return a == b[1:]
	}
	return false
}

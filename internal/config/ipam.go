// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"net/netip"
	"strings"

	"go.yaml.in/yaml/v3"
)

// ipam reads the configuration of an IPAM plugin and returns it as JSON, "" if there is
// none. Of the plugins that most clusters have it checks all that would keep every pod from
// starting; of others, and of fields that are not known here, only the plugin knows.
func (d *decoder) ipam(f field) string {
	if f.node.Kind == yaml.MappingNode && len(f.node.Content) == 0 {
		return ""
	}
	before := len(d.errs)
	fs := d.anyMapping(f)
	if len(d.errs) > before {
		return ""
	}
	var kind string
	d.text(fs, "type", &kind)
	switch {
	case kind == "":
		d.errorf(fs.where("type"), "is missing: want the name of an IPAM plugin such as whereabouts, host-local, dhcp or static")
	case !validName(kind, "") || strings.Trim(kind, ".") == "":
		d.errorf(fs.where("type"), "%q, want the name of an IPAM plugin's program in the CNI directory, such as whereabouts", kind)
	}
	switch kind {
	case "host-local":
		d.hostLocal(fs)
	case "whereabouts":
		d.whereabouts(fs)
	case "static":
		d.static(fs)
	}
	d.routes(fs)
	if len(d.errs) > before {
		return ""
	}
	var v map[string]any
	err := f.node.Decode(&v)
	var b []byte
	if err == nil {
		b, err = json.Marshal(v)
	}
	switch {
	case err != nil:
		d.errorf(f, "cannot be written as JSON, which CNI wants: %v", err)
		return ""
	case len(b) > maxIPAMBytes:
		d.errorf(f, "has %d bytes, at most %d are allowed", len(b), maxIPAMBytes)
		return ""
	}
	return string(b)
}

// anyMapping reads a mapping whose keys are somebody else's. It refuses aliases anywhere
// below, as scalar does.
func (d *decoder) anyMapping(f field) fields {
	fs := fields{self: f, at: map[string]field{}}
	if f.node.Kind != yaml.MappingNode {
		d.errorf(f, "is %s, want a mapping", kind(f.node))
		return fs
	}
	for i := 0; i+1 < len(f.node.Content); i += 2 {
		key, value := f.node.Content[i], f.node.Content[i+1]
		kf := field{path: join(f.path, key.Value), node: value}
		switch {
		case key.Kind != yaml.ScalarNode:
			d.errorf(field{path: f.path, node: key}, "has a key that is %s, want a text", kind(key))
		case fs.has(key.Value):
			d.errorf(field{path: kf.path, node: key}, "is given twice")
		default:
			fs.at[key.Value] = kf
			d.noAlias(kf)
		}
	}
	return fs
}

func (d *decoder) noAlias(f field) {
	if f.node.Kind == yaml.AliasNode {
		d.errorf(f, "is %s", kind(f.node))
		return
	}
	for _, n := range f.node.Content {
		d.noAlias(field{path: f.path, node: n})
	}
}

// items are the mappings of a list; none if the field is missing.
func (d *decoder) items(fs fields, key string) (out []fields) {
	f, ok := fs.get(key)
	if !ok {
		return nil
	}
	for _, item := range d.list(f) {
		out = append(out, d.anyMapping(item))
	}
	return out
}

// hostLocal checks what host-local checks for each pod: sets of ranges, each with a subnet
// and addresses in it.
func (d *decoder) hostLocal(fs fields) {
	found := false
	if fs.has("subnet") { // the form from before there were several ranges
		d.hostLocalRange(fs)
		found = true
	}
	if f, ok := fs.get("ranges"); ok {
		for _, set := range d.list(f) {
			for _, one := range d.list(set) {
				d.hostLocalRange(d.anyMapping(one))
				found = true
			}
		}
	}
	if !found {
		d.errorf(fs.where("ranges"), "is missing or empty: host-local wants lists of subnets, as in ranges: [[{subnet: 192.0.2.0/24}]]")
	}
}

func (d *decoder) hostLocalRange(fs fields) {
	subnet, ok := d.prefix(fs, "subnet")
	if !ok {
		return
	}
	switch {
	case subnet != subnet.Masked():
		d.errorf(fs.where("subnet"), "%v has bits set behind its length: did you mean %v?", subnet, subnet.Masked())
		return
	case subnet.Bits() > subnet.Addr().BitLen()-2:
		d.errorf(fs.where("subnet"), "%v has no room for addresses and a gateway", subnet)
		return
	}
	var ends [2]netip.Addr
	for i, key := range []string{"rangeStart", "rangeEnd"} {
		a, ok := d.address(fs, key)
		if ends[i] = a; ok && !subnet.Contains(a) {
			d.errorf(fs.where(key), "%v is not in the subnet %v", a, subnet)
		}
	}
	if ends[0].IsValid() && ends[1].IsValid() && ends[1].Less(ends[0]) {
		d.errorf(fs.where("rangeEnd"), "%v is before rangeStart, %v", ends[1], ends[0])
	}
	d.address(fs, "gateway")
}

// whereabouts checks its ranges, which may be written in two ways, for one and for several.
func (d *decoder) whereabouts(fs fields) {
	all := d.items(fs, "ipRanges")
	if fs.has("range") {
		all = append(all, fs)
	}
	if len(all) == 0 {
		d.errorf(fs.where("range"), "is missing: whereabouts wants a range such as 192.0.2.0/24")
	}
	for _, one := range all {
		d.whereaboutsRange(one)
	}
	d.address(fs, "gateway")
}

// whereaboutsRange checks a range, 192.0.2.0/24 or 192.0.2.10-192.0.2.99/24.
func (d *decoder) whereaboutsRange(fs fields) {
	f, ok := fs.get("range")
	if !ok {
		d.errorf(fs.where("range"), "is missing: want a range such as 192.0.2.0/24")
		return
	}
	s, ok := d.scalar(f, "a range such as 192.0.2.0/24")
	if !ok {
		return
	}
	text := s
	var first netip.Addr
	if a, rest, two := strings.Cut(s, "-"); two {
		var err error
		if first, err = netip.ParseAddr(strings.TrimSpace(a)); err != nil {
			d.errorf(f, "%q, want a range such as 192.0.2.0/24 or 192.0.2.10-192.0.2.99/24", s)
			return
		}
		text = strings.TrimSpace(rest)
	}
	subnet, err := netip.ParsePrefix(text)
	if err != nil || first.IsValid() && !subnet.Contains(first) {
		d.errorf(f, "%q, want a range such as 192.0.2.0/24 or 192.0.2.10-192.0.2.99/24", s)
		return
	}
	for _, key := range []string{"range_start", "range_end"} {
		if a, ok := d.address(fs, key); ok && !subnet.Contains(a) {
			d.errorf(fs.where(key), "%v is not in the range %v", a, subnet.Masked())
		}
	}
	e, ok := fs.get("exclude")
	if !ok {
		return
	}
	for _, item := range d.list(e) {
		s, ok := d.scalar(item, "a CIDR such as 192.0.2.0/28")
		if _, err := netip.ParsePrefix(s); ok && err != nil {
			d.errorf(item, "%q, want a CIDR such as 192.0.2.0/28", s)
		}
	}
}

// static checks the addresses, which every pod gets.
func (d *decoder) static(fs fields) {
	all := d.items(fs, "addresses")
	if len(all) == 0 {
		d.errorf(fs.where("addresses"), "is missing or empty: static wants addresses such as [{address: 192.0.2.7/24}]")
	}
	for _, one := range all {
		d.prefix(one, "address")
		d.address(one, "gateway")
	}
}

// routes checks the routes, which all plugins write the same way.
func (d *decoder) routes(fs fields) {
	for _, r := range d.items(fs, "routes") {
		dst, ok := d.prefix(r, "dst")
		d.address(r, "gw")
		if ok && dst.Bits() == 0 && !r.has("priority") && !r.has("table") {
			d.errorf(r.where("dst"), "%v is a default route, and would take the place of that of the pod's own network: leave it out, or give it a priority or table", dst)
		}
	}
}

// prefix reads an address with the length of its network's prefix, which must be there.
func (d *decoder) prefix(fs fields, key string) (netip.Prefix, bool) {
	f, ok := fs.get(key)
	if !ok {
		d.errorf(fs.where(key), "is missing: want a network such as 192.0.2.0/24")
		return netip.Prefix{}, false
	}
	s, ok := d.scalar(f, "a network such as 192.0.2.0/24")
	if !ok {
		return netip.Prefix{}, false
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		d.errorf(f, "%q, want an address and the length of its network's prefix, such as 192.0.2.0/24", s)
	}
	return p, err == nil
}

// address reads an address; ok is false if there is none.
func (d *decoder) address(fs fields, key string) (_ netip.Addr, ok bool) {
	f, ok := fs.get(key)
	if !ok {
		return netip.Addr{}, false
	}
	s, ok := d.scalar(f, "an address such as 192.0.2.1")
	if !ok {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		d.errorf(f, "%q, want an address such as 192.0.2.1", s)
	}
	return a, err == nil
}

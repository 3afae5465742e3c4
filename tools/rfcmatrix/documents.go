// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
)

// document is what a table is about.
type document struct {
	dir   string   // of the statements; the table is beside it
	title string   // of the table
	about string   // what the statements are of
	rfcs  []string // numbers; with several, sections begin with them
	code  []string // directories whose comments are checked
	text  string   // what it is called; "": the RFC
	linux string   // who "Linux" is in it; "": it has nothing of Linux
}

// documents are all tables that there are.
var documents = []document{
	{
		dir: "docs/rfc7609", title: "RFC 7609", about: "RFC 7609", rfcs: []string{"7609"}, code: []string{"pkg/smcr/"},
		linux: " \"Linux\" is the SMC-R of the\nLinux kernel, with which we are wire compatible; some rules hold towards all others, but [not towards it](#towards-linux).",
	},
	{
		dir: "docs/iwarp", title: "iWARP", about: "iWARP", rfcs: []string{"5040", "5041", "5044", "6581"}, code: []string{"pkg/rdma/iwarp/"},
		linux: " \"Linux\" is siw, the software iWARP of the\nLinux kernel, with which we are wire compatible; some rules hold towards all others, but [not towards it](#towards-linux).",
	},
	{
		dir: "docs/ssp", title: "Socket Service Point", about: "revision 0.7 of DAT 2.0's iWARP extensions", rfcs: []string{"DAT"}, text: "the document",
		code: []string{"pkg/rdma/internal/ssp/", "pkg/rdma/softiwarp/"},
	},
	{
		dir: "docs/vitcp", title: "VI/TCP", about: "draft-dicecco-vitcp-00", rfcs: []string{"VI/TCP"}, text: "the draft", code: []string{"pkg/rdma/vitcp/", "pkg/rdma/softvi/"},
	},
	{
		dir: "docs/portmap", title: "SDP's port mapper", about: "section 7 of the draft of SDP", rfcs: []string{"SDP"}, text: "the draft",
		code:  []string{"pkg/sdp/portmap/", "pkg/sdp/portmapper/"},
		linux: " \"Linux\" is iwpmd, rdma-core's port\nmapper, with which we are wire compatible; some rules hold towards all others, but [not towards it](#towards-linux).",
	},
	{
		dir: "docs/sdp", title: "Sockets Direct Protocol for iWARP", about: "draft-pinkerton-iwarp-sdp-01", rfcs: []string{"SDP"}, text: "the draft",
		code: []string{"pkg/sdp/"},
	},
}

// output is the path of the table.
func (d *document) output() string { return d.dir + ".md" }

// kind is what the document is called in its table.
func (d *document) kind() string {
	if d.text == "" {
		return "the RFC"
	}
	return d.text
}

// covers reports whether comments of a file are checked for sections of the document: that of all
// documents whose directory is the nearest one above the file.
func (d *document) covers(file string) bool {
	own := d.nearest(file)
	return own > 0 && !slices.ContainsFunc(documents, func(o document) bool { return o.nearest(file) > own })
}

// nearest returns how long the longest directory of the document is that a file is in, or 0.
func (d *document) nearest(file string) int {
	longest := 0
	for _, dir := range d.code {
		if strings.HasPrefix(file, dir) {
			longest = max(longest, len(dir))
		}
	}
	return longest
}

// section returns the number under which the statements have a section that a comment
// names, or "" if it is not of this document.
func (d *document) section(c citation) string {
	switch {
	case len(d.rfcs) == 1 && (c.rfc == "" || c.rfc == d.rfcs[0]):
		return c.section
	case len(d.rfcs) > 1 && slices.Contains(d.rfcs, c.rfc):
		return c.rfc + "." + c.section
	}
	return ""
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// Table prints rows with aligned columns. The columns of a row are separated by tabs.
func Table(w io.Writer, rows ...string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		if _, err := fmt.Fprintln(tw, r); err != nil {
			return err
		}
	}
	return tw.Flush()
}

// Row is a row of a table. An empty field shows as a hyphen.
func Row(fields ...any) string {
	s := make([]string, len(fields))
	for i, f := range fields {
		s[i] = cmp.Or(printable(fmt.Sprint(f)), "-")
	}
	return strings.Join(s, "\t")
}

// printable replaces characters that would move the cursor, or begin a row or a column: a peer, or
// somebody who may write annotations, may have put them into the text.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r != ' ' && !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// Line makes one printable line of a text that others may have written. Row does so with its fields.
func Line(text string) string { return printable(strings.ReplaceAll(text, "\n", "; ")) }

// PrintStatus prints the status of an agent, with the problems that keep connections off
// SMC-R.
func PrintStatus(w io.Writer, s agentapi.Status) error {
	state := "carrying connections over SMC-R"
	switch {
	case s.Draining:
		state = "stopping"
	case !s.Accelerating && len(s.Problems) == 0:
		state = "ready, no pod is attached that a policy selects"
	case !s.Accelerating:
		state = "everything is plain TCP"
	}
	rows := []string{
		Row("node", s.Node),
		Row("agent", fmt.Sprintf("%s, up %s", s.Version, age(s.Started))),
		Row("state", state),
	}
	for _, d := range s.Devices {
		rows = append(rows, Row("device", describeDevice(d)))
	}
	if s.Wire.State != agentapi.WireNone {
		rows = append(rows, Row("wire", describeWire(s.Wire)))
	}
	rows = append(rows,
		Row("policies", strings.Join(s.Policies, ", ")),
		Row("pods", describePods(s.Pods)),
		Row("link groups", s.LinkGroups),
		Row("connections", fmt.Sprintf("%d now, %d of them on SMC-R", s.Conns.Live, s.Conns.LiveSMCR)),
		Row("since start", fmt.Sprintf("%d on SMC-R (%s), %d on TCP (%s), %d reset",
			s.Conns.TotalSMCR, size(s.Conns.BytesSMCR), s.Conns.TotalTCP, size(s.Conns.BytesTCP), s.Conns.Reset)),
	)
	if k := s.Conns.Kernel; k != nil {
		rows = append(rows, Row("of kernels", fmt.Sprintf("%d pods, %d connections now, %d of them on SMC-R; %d on SMC-R, %d on TCP since start",
			k.Pods, k.Live, k.LiveSMCR, k.TotalSMCR, k.TotalTCP)))
	}
	rows = append(rows, budgetRows(&s.NodeBudget)...)
	if s.FewFiles != "" {
		rows = append(rows, Row("files", s.FewFiles))
	}
	for _, p := range s.Problems {
		rows = append(rows, Row("problem", p))
	}
	if err := Table(w, rows...); err != nil || len(s.Reasons) == 0 {
		return err
	}
	rows = []string{"\n" + Row("NOT ON SMC-R", "COUNT", "MEANING")}
	for _, c := range slices.Sorted(maps.Keys(s.Reasons)) {
		rows = append(rows, Row(c, s.Reasons[c], c.Text()))
	}
	return Table(w, rows...)
}

// budgetRows say what is used of a node's budget, and for how much there is room.
func budgetRows(b *agentapi.Budget) []string {
	return []string{
		Row("budget", fmt.Sprintf("%s of %s memory, %d of %d connections",
			size(uint64(b.MemoryUsedBytes)), size(uint64(b.MemoryBytes)), b.ConnsUsed, b.Conns)),
		Row("room", fmt.Sprintf("for %d connections on SMC-R, or for one with each of %d peers", b.RoomConns, b.RoomPeers)),
		Row("plain TCP", fmt.Sprintf("%d of %d relays, %d of %d connections being set up", b.RelaysUsed, b.Relays, b.PendingUsed, b.Pending)),
		Row("sockets", fmt.Sprintf("%s of %s of buffers, if they were full", size(uint64(b.SocketUsedBytes)), size(uint64(b.SocketBytes)))),
	}
}

func describePods(p agentapi.PodCount) string {
	text := fmt.Sprintf("%d attached, %d ready, %d failed", p.Attached, p.Ready, p.Failed)
	if p.Paused > 0 {
		text += fmt.Sprintf("; %d not diverted for now: see attachments", p.Paused)
	}
	return text
}

func describeDevice(d agentapi.Device) string {
	text := d.Name + ": " + d.Provider
	if d.Address != "" {
		text += ", " + d.Address
	}
	if d.Interface != "" {
		text += " on " + d.Interface
	}
	if d.Missing != "" {
		return text + ": missing"
	}
	return fmt.Sprintf("%s, MTU %d, port %s", text, d.MTU, d.Port)
}

// describeWire says who may send RoCE packets, and how many packets of others were dropped.
func describeWire(w agentapi.Wire) string {
	var text string
	switch w.State {
	case agentapi.WireFiltered:
		text = fmt.Sprintf("RoCE packets of %d addresses and networks", w.Allowed)
	case agentapi.WireOpen:
		text = "RoCE packets of everybody"
	case agentapi.WirePending:
		text = "RoCE packets not filtered by this agent yet"
	case agentapi.WireFailed, agentapi.WireNone:
		text = "RoCE packets not filtered as wanted"
	}
	if w.Detail != "" && w.State != agentapi.WireFailed { // a failure is among the problems
		text += ": " + w.Detail
	}
	if w.Sum() == 0 {
		return text
	}
	var parts []string
	for _, why := range slices.Sorted(maps.Keys(w.Dropped)) {
		parts = append(parts, fmt.Sprintf("%d %s", w.Dropped[why], why))
	}
	return fmt.Sprintf("%s; dropped: %s", text, strings.Join(parts, ", "))
}

// PrintLinks prints link groups and their links.
func PrintLinks(w io.Writer, l agentapi.Links) error {
	if len(l.LinkGroups) == 0 {
		return Table(w, append([]string{"no link groups"}, problem(l.Problem)...)...)
	}
	rows := []string{Row("GROUP", "POD", "DATAPATH", "ROLE", "STATE", "REDUNDANCY", "PEER ID", "VERSION", "CONNS", "RMBS", "LINK", "LINK STATE", "DEVICE", "LOCAL", "PEER", "MTU", "SENT", "RECEIVED", "AGE")}
	for _, g := range l.LinkGroups {
		state := g.State
		if g.Error != "" {
			state += " (" + g.Error + ")"
		}
		group := []any{g.ID, g.Pod, datapath(g.Datapath), g.Role, state, g.Redundancy, g.PeerID, versionOf(g), g.Conns, size(uint64(g.RMBBytes))}
		for _, k := range g.Links {
			device := strings.TrimSuffix(k.Device+" "+k.PCI, " ")
			row := slices.Concat(group, []any{k.ID, k.State, device})
			if g.Datapath == "" {
				row = append(row, fmt.Sprintf("%s qp %d", address(k.LocalGID), k.LocalQPN), fmt.Sprintf("%s qp %d", address(k.PeerGID), k.PeerQPN),
					k.MTU, size(k.BytesSent), size(k.BytesRecv), age(g.Opened))
			} else {
				row = append(row, address(k.LocalGID), address(k.PeerGID), "", "", "", "")
			}
			rows = append(rows, Row(row...))
			group = []any{"", "", "", "", "", "", "", "", "", ""}
		}
		if len(g.Links) == 0 {
			rows = append(rows, Row(append(group, "", "", "", "", "", "", "", "", opened(g.Opened))...))
		}
	}
	return Table(w, append(rows, problem(l.Problem)...)...)
}

// datapath shows what carries connections.
func datapath(name string) string { return cmp.Or(name, "Agent") }

// problem is the row that says why something is missing from a list, or none.
func problem(text string) []string {
	if text == "" {
		return nil
	}
	return []string{"problem: " + Line(text)}
}

// versionOf shows the version of SMC-R with the enterprise ID or, of version 1, with the dialect. Two link
// groups with the same peer may differ in these.
func versionOf(g agentapi.LinkGroup) string {
	if g.Version >= 2 {
		return fmt.Sprintf("v%d %s", g.Version, g.EID)
	}
	return fmt.Sprintf("v%d %s", g.Version, g.Dialect)
}

// address shows an IPv4 GID as IPv4.
func address(gid string) string { return strings.TrimPrefix(gid, "::ffff:") }

// PrintConns prints connections.
func PrintConns(w io.Writer, c agentapi.Conns) error {
	if len(c.Conns) == 0 {
		return Table(w, append([]string{"no connections"}, problem(c.Problem)...)...)
	}
	rows := []string{Row("ID", "POD", "DATAPATH", "DIRECTION", "SOURCE", "DESTINATION", "MODE", "REASON", "GROUP", "STATE", "SENT", "RECEIVED", "AGE")}
	for _, x := range c.Conns {
		group, sent, recv := "", "", "" // the bytes of plain TCP are counted at the end only
		if x.LinkGroup != 0 {
			group = fmt.Sprintf("%d/%d", x.LinkGroup, x.Link)
		}
		if x.LinkGroup != 0 && x.Datapath == "" {
			sent, recv = size(x.BytesSent), size(x.BytesRecv)
		}
		rows = append(rows, Row(x.ID, x.Pod, datapath(x.Datapath), x.Direction, x.Source, x.Dest, x.Mode, x.Reason, group, x.State, sent, recv, opened(x.Opened)))
	}
	return Table(w, append(rows, problem(c.Problem)...)...)
}

// PrintAttachments prints attached pods, and destinations that are not diverted.
func PrintAttachments(w io.Writer, a agentapi.Attachments) error {
	rows := []string{Row("POD", "INTERFACE", "STATE", "ADDRESSES", "POLICIES", "NETNS", "DETAIL")}
	for _, x := range a.Attachments {
		if x.Paused != agentapi.CodeOK {
			x.Detail = "not diverted for now: " + x.Paused.Text()
		} else if len(x.GreedySources) > 0 {
			x.Detail = fmt.Sprintf("not diverted for now from %v: %s", x.GreedySources, agentapi.CodeBudgetSource.Text())
		} else if x.Datapath != "" && x.Detail == "" {
			x.Detail = "datapath " + x.Datapath
		} else if x.NotKernel != "" && x.Detail == "" {
			x.Detail = "datapath Agent: " + x.NotKernel
		}
		var addrs []string
		for _, p := range x.Addresses {
			addrs = append(addrs, p.String())
		}
		rows = append(rows, Row(x.Pod, x.Interface, x.State, strings.Join(addrs, ","), strings.Join(x.Policies, ","), x.NetNS, x.Detail))
	}
	if len(a.Bypasses) > 0 {
		rows = append(rows, "", Row("POD", "NOT DIVERTED", "REASON", "FOR"))
		for _, b := range a.Bypasses {
			rows = append(rows, Row(b.Pod, b.Dest, b.Reason, max(time.Until(b.Until), 0).Round(time.Second)))
		}
	}
	for _, m := range a.Malformed {
		rows = append(rows, "ignored: "+Line(m))
	}
	return Table(w, rows...)
}

// PrintExplanation prints why connections are on SMC-R, or why not.
func PrintExplanation(w io.Writer, e agentapi.Explanation) error {
	rows := []string{Row("verdict", e.Verdict)}
	add := func(name, value string) {
		if value != "" {
			rows = append(rows, Row(name, value))
		}
	}
	add("reason", string(e.Code))
	if e.Budget != nil {
		add("budget", e.Budget.String())
	}
	add("what to do", e.Advice)
	add("pod", e.Pod)
	add("policy", e.Policy)
	if len(e.Unresolved) > 0 {
		add("not in force", strings.Join(e.Unresolved, ", ")+": the controller has not resolved the peers yet; until then the form from before is in force; of a new policy nothing where a pod that it selects ran before, else all but the peers that are to be found")
	}
	if e.NotKernel != "" {
		add("datapath", "Agent: "+e.NotKernel)
	}
	if e.Required {
		add("mode", "Required: connections without SMC-R are reset")
	}
	add("problem", e.Problem)
	if e.Bypassed != nil {
		add("not diverted until", e.Bypassed.Until.Local().Format("15:04:05 MST"))
	}
	if err := Table(w, rows...); err != nil {
		return err
	}
	if len(e.Live) > 0 {
		if _, err := fmt.Fprintln(w); err != nil {
			return err
		}
		if err := PrintConns(w, agentapi.Conns{Conns: e.Live}); err != nil {
			return err
		}
	}
	if len(e.Recent) == 0 {
		return nil
	}
	rows = []string{"", Row("LAST", "COUNT", "SEEN FROM", "MODE", "REASON", "DETAIL")}
	for _, d := range e.Recent {
		detail := cmp.Or(d.Detail, d.Reason.Text())
		if d.PeerDeclined {
			detail = "the peer: " + detail
		}
		rows = append(rows, Row(age(d.Last)+" ago", d.Count, d.Direction, d.Mode, d.Reason, detail))
	}
	return Table(w, rows...)
}

// opened shows how long ago something was opened, "" if that is not known.
func opened(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return age(t)
}

func age(t time.Time) string {
	d := max(time.Since(t), 0) // the time may be another machine's
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

func size(n uint64) string {
	for _, u := range []struct {
		shift uint
		name  string
	}{{40, "TiB"}, {30, "GiB"}, {20, "MiB"}, {10, "KiB"}} {
		if n >= 1<<u.shift {
			return fmt.Sprintf("%.1f %s", float64(n)/float64(uint64(1)<<u.shift), u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}

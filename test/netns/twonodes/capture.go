// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

// markedLines is the length of the marked transfer: 256 KiB, so that it is
// larger than a packet and fits into no single one.
const markedLines = 256 << 10 / markedLine

// capture records a marked transfer on all links of the client's node, and
// looks at the records with tshark.
func (ap *Applications) capture(ctx context.Context) error {
	marker := fmt.Sprintf("kube-smcr-demo-%016x", rand.Uint64())
	if err := writeFile(filepath.Join(ap.server.Dir, "marked"), markedText(marker)); err != nil {
		return err
	}
	if err := ap.lab.SplitSegments(true); err != nil {
		return err
	}
	defer func() {
		if err := ap.lab.SplitSegments(false); err != nil {
			ap.check("batches on the underlay again", false, "%v", err)
		}
	}()
	dir := filepath.Join(ap.lab.Dir, "capture")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	files := map[string]string{}
	var dumps []*lab.Proc
	for _, link := range append(ap.underlays(), lab.Trunk) {
		files[link] = filepath.Join(dir, link+".pcap")
		p, err := ap.startDump(ctx, link, files[link])
		if err != nil {
			return err
		}
		dumps = append(dumps, p)
	}
	var got bytes.Buffer
	proc, err := ap.client.Start(lab.Command{
		Args: []string{
			"curl", "--silent", "--show-error", "--fail", "--header", "Marker: " + marker,
			fmt.Sprintf("http://%s:%d/marked", ap.server.Addr4, portHTTP),
		},
		Stdout: &got,
	})
	if err != nil {
		return err
	}
	rctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	if err := proc.Wait(rctx); err != nil {
		return err
	}
	if err := ap.quiesce(ctx); err != nil {
		return err
	}
	for _, p := range dumps {
		if err := p.Stop(); err != nil {
			return err
		}
		if s := dropped(p.Stderr()); s != "" {
			ap.check("the capture is complete", false, "%s", s)
		}
	}
	ap.check("the marked transfer is right", got.String() == markedText(marker), "%s", byteCount(uint64(got.Len())))
	return ap.inspect(ctx, files, marker)
}

// underlays are the names of the client's node's links for RoCE.
func (ap *Applications) underlays() []string {
	var out []string
	for _, r := range ap.client.Node.RNICs {
		out = append(out, r.Name)
	}
	return out
}

// startDump starts tcpdump on a link of the client's node and waits until it
// listens.
func (ap *Applications) startDump(ctx context.Context, link, file string) (*lab.Proc, error) {
	p, err := ap.client.Node.Start(lab.Command{Args: []string{
		"tcpdump", "-i", link, "-n", "-s", "0", "-U", "-B", "16384", "--immediate-mode", "-Z", "root", "-w", file,
	}})
	if err != nil {
		return nil, err
	}
	t := time.NewTicker(tryEvery / 5)
	defer t.Stop()
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for !strings.Contains(p.Stderr(), "listening on") {
		select {
		case <-p.Done():
			return nil, errors.Join(errors.New("tcpdump ended"), p.Wait(ctx))
		case <-ctx.Done():
			return nil, fmt.Errorf("tcpdump does not listen: %s", p.Stderr())
		case <-t.C:
		}
	}
	return p, nil
}

// dropped finds in tcpdump's last words whether it lost packets.
func dropped(s string) string {
	for line := range strings.Lines(s) {
		if n, ok := strings.CutSuffix(strings.TrimSpace(line), " packets dropped by kernel"); ok && n != "0" {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

// inspect lets tshark decode the captures and checks what it says.
func (ap *Applications) inspect(ctx context.Context, files map[string]string, marker string) error {
	c := &ap.findings.Capture
	c.MalformedFrames = []int{}
	var roce, tcp []frame
	for _, link := range append(ap.underlays(), lab.Trunk) {
		out, err := tshark(ctx, files[link])
		if err != nil {
			return err
		}
		frames, err := parseFrames(out)
		if err != nil {
			return fmt.Errorf("%s: %w", files[link], err)
		}
		if link == lab.Trunk {
			tcp = frames
		} else {
			roce = append(roce, frames...)
		}
		kept, err := keepCapture(files[link], ap.cfg.Captures)
		if err != nil {
			return err
		}
		c.Files = append(c.Files, kept)
	}
	c.look(roce, tcp, marker)
	// A packet boundary may cut a marker, and then the packet's share is not
	// counted.
	const least = markedLines * markedLine * 98 / 100
	ap.check("the payload is in RoCE packets", c.RoCEPayload >= least,
		"%s of the marked transfer in RDMA WRITE packets to UDP port %d (%d RoCE packets in all)", byteCount(c.RoCEPayload), rocePort, c.RoCEPackets)
	ap.check("nothing of it is on TCP", c.TCPPayload == 0, "%d bytes", c.TCPPayload)
	ap.check("TCP carries CLC messages only", c.TCPOther == 0 && strings.Join(c.CLCMessages, " ") == "Proposal Accept Confirm",
		"%s; %d packets with other data", describe(c.CLCMessages, "no CLC"), c.TCPOther)
	ap.check("tshark finds nothing malformed", len(c.MalformedFrames) == 0 && len(roce) > 0 && len(tcp) > 0,
		"%d and %d frames, malformed %v; captures in %s", len(roce), len(tcp), c.MalformedFrames, ap.cfg.Captures)
	return nil
}

// tshark decodes a capture. The ports of the servers are other protocols' for
// it, but CLC has an eyecatcher, so that is looked at first. Its guess that
// payload of an RDMA WRITE may be RPC over RDMA is switched off: the file's
// bytes are anything.
func tshark(ctx context.Context, file string) (string, error) {
	args := []string{"-n", "-r", file, "--disable-protocol", "rpcordma", "-o", "tcp.try_heuristic_first:TRUE", "-T", "fields", "-E", "separator=|"}
	for _, f := range frameFields {
		args = append(args, "-e", f)
	}
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, "tshark", args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("tshark %s: %w: %s", file, err, stderr.String())
	}
	return string(out), nil
}

// keepCapture copies a capture to where the user finds it.
func keepCapture(file, dir string) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	name := filepath.Join(dir, filepath.Base(file))
	return name, os.WriteFile(name, b, 0o644)
}

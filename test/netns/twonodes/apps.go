// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

// Applications is a story: nginx, redis and iperf3 talk without and with SMC-R,
// first watched by tshark, and SMC-R is taken away in several ways. It is owned by
// one goroutine.
type Applications struct {
	*Nodes
	bodies   bodies
	findings Findings
}

// NewApplications begins the story. Close it, whether it was run or not.
func NewApplications(cfg Config, audience Audience) *Applications {
	return &Applications{Nodes: &Nodes{cfg: cfg, audience: audience, began: time.Now()}}
}

// Run tells the story. An error ends it; a statement that does not hold does not.
func (ap *Applications) Run(ctx context.Context) error {
	return ap.play(ctx, applicationsTimeout, []step{
		{"two nodes, and pods attached by bridge, host-local and smcr-cni", ap.build},
		{"servers, without any privilege", ap.startServers},
		{"the applications over plain TCP, no agent runs", ap.measurePlain},
		{"the agents", ap.startAgents},
		{"a small transfer under tcpdump, looked at by tshark", ap.capture},
		{"the applications again, with SMC-R", ap.measureSMCR},
		{"a server that has no SMC-R", ap.fallback},
		{"the client's agent is killed", ap.killAgent},
		{"the agent starts again", ap.restartAgent},
	})
}

// Findings returns what was found out so far.
func (ap *Applications) Findings() Findings { return ap.findings }

// Ports of the servers.
const (
	portHTTP  = 8080
	portRedis = 6379
	portIperf = 5201
	// portEcho is the port of the probes' server.
	portEcho = 7777
)

// sizes are how much each application does.
type sizes struct {
	fileBytes, smallBytes int64
	redisRequests         int
	redisClients          int
	iperfSeconds          int
	iperfStreams          int
}

func (ap *Applications) sizes() sizes {
	if ap.cfg.Quick {
		return sizes{64 << 20, 1 << 20, 10_000, 20, 2, 4}
	}
	return sizes{512 << 20, 1 << 20, 50_000, 20, 5, 4}
}

// bodies are the files that nginx serves, with their checksums.
type bodies struct {
	large, small body
}

type body struct {
	bytes  int64
	sha256 string
}

// makeBody writes random bytes, so that no block is like another one.
func makeBody(file string, size int64) (_ body, err error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o644)
	if err != nil {
		return body{}, err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	var seed [32]byte
	copy(seed[:], strconv.FormatUint(rand.Uint64(), 16))
	h := sha256.New()
	if _, err := io.CopyN(io.MultiWriter(f, h), rand.NewChaCha8(seed), size); err != nil {
		return body{}, fmt.Errorf("write %s: %w", file, err)
	}
	return body{size, hex.EncodeToString(h.Sum(nil))}, nil
}

// nginxConf serves the directory; below /slow/ it takes its time.
const nginxConf = `
daemon off;
worker_processes 1;
pid %[1]s/nginx.pid;
error_log %[1]s/nginx-error.log;
events { worker_connections 256; }
http {
  access_log off;
  sendfile on;
  client_body_temp_path %[1]s/nginx-body;
  proxy_temp_path %[1]s/nginx-proxy;
  fastcgi_temp_path %[1]s/nginx-fastcgi;
  uwsgi_temp_path %[1]s/nginx-uwsgi;
  scgi_temp_path %[1]s/nginx-scgi;
  server {
    listen %[2]d;
    listen [::]:%[2]d;
    root %[1]s;
    location /slow/ { alias %[1]s/; limit_rate 256k; }
  }
}
`

// startNginx starts nginx in a pod and waits for it.
func startNginx(ctx context.Context, p *lab.Pod) error {
	conf := filepath.Join(p.Dir, "nginx.conf")
	if err := writeFile(conf, fmt.Sprintf(nginxConf, p.Dir, portHTTP)); err != nil {
		return err
	}
	return startServer(ctx, p, portHTTP, "nginx", "-e", "stderr", "-p", p.Dir, "-c", conf)
}

func startServer(ctx context.Context, p *lab.Pod, port uint16, args ...string) error {
	proc, err := p.Start(lab.Command{Args: args})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := p.WaitListening(ctx, port); err != nil {
		return fmt.Errorf("%w: %s%s", err, proc.Stderr(), proc.Output())
	}
	return nil
}

// startServers starts what the clients talk to. The servers run through the
// whole demo and never learn about SMC-R.
func (ap *Applications) startServers(ctx context.Context) (err error) {
	n := ap.sizes()
	if ap.bodies.large, err = makeBody(filepath.Join(ap.server.Dir, "large"), n.fileBytes); err != nil {
		return err
	}
	if ap.bodies.small, err = makeBody(filepath.Join(ap.server.Dir, "small"), n.smallBytes); err != nil {
		return err
	}
	small, err := os.ReadFile(filepath.Join(ap.server.Dir, "small"))
	if err != nil {
		return err
	}
	if err := writeFile(filepath.Join(ap.legacy.Dir, "small"), string(small)); err != nil {
		return err
	}
	for _, p := range []*lab.Pod{ap.server, ap.legacy} {
		if err := startNginx(ctx, p); err != nil {
			return err
		}
	}
	if err := startServer(ctx, ap.server, portRedis, "redis-server", "--port", strconv.Itoa(portRedis), "--save", "",
		"--appendonly", "no", "--protected-mode", "no", "--dir", ap.server.Dir); err != nil {
		return err
	}
	return startServer(ctx, ap.server, portIperf, "iperf3", "--server", "--port", strconv.Itoa(portIperf))
}

// An app is one application with its own way to say how fast it was.
type app struct {
	name string
	run  func(ctx context.Context) (outcome, error)
}

// outcome is what an application says about its run.
type outcome struct {
	rate Rate
	// bytes is the payload that it moved at least.
	bytes uint64
	// wrong says what is wrong with what was received, if anything.
	wrong string
}

func (ap *Applications) apps() []app {
	n := ap.sizes()
	return []app{
		{fmt.Sprintf("nginx + curl, %s", byteCount(uint64(n.fileBytes))), func(ctx context.Context) (outcome, error) {
			return ap.curl(ctx, ap.server.Addr4.String(), "large", ap.bodies.large)
		}},
		{fmt.Sprintf("nginx + curl, %s, IPv6", byteCount(uint64(n.fileBytes))), func(ctx context.Context) (outcome, error) {
			return ap.curl(ctx, "["+ap.server.Addr6.String()+"]", "large", ap.bodies.large)
		}},
		{fmt.Sprintf("redis-benchmark, %d clients", n.redisClients), ap.redisApp},
		{fmt.Sprintf("iperf3, %d streams", n.iperfStreams), ap.iperfApp},
	}
}

// curl fetches a file from nginx and compares its checksum.
func (n *Nodes) curl(ctx context.Context, host, file string, want body, options ...string) (outcome, error) {
	h := sha256.New()
	url := fmt.Sprintf("http://%s:%d/%s", host, portHTTP, file)
	proc, err := n.client.Start(lab.Command{
		Args: append([]string{
			"curl", "--silent", "--show-error", "--fail", "--globoff", "--write-out", "%{stderr}%{size_download} %{speed_download}\n", url,
		}, options...),
		Stdout: h,
	})
	if err != nil {
		return outcome{}, err
	}
	werr := proc.Wait(ctx)
	o, err := parseCurl(proc.Stderr())
	if werr != nil || err != nil {
		return o, cmp.Or(werr, err)
	}
	if sum := hex.EncodeToString(h.Sum(nil)); sum != want.sha256 || int64(o.bytes) != want.bytes {
		o.wrong = fmt.Sprintf("%d bytes with checksum %.16s, want %d with %.16s", o.bytes, sum, want.bytes, want.sha256)
	}
	return o, nil
}

func (ap *Applications) redisApp(ctx context.Context) (outcome, error) {
	n := ap.sizes()
	out, err := ap.client.Run(ctx, lab.Command{Args: []string{
		"redis-benchmark", "-h", ap.server.Addr4.String(), "-p", strconv.Itoa(portRedis), "-c", strconv.Itoa(n.redisClients),
		"-n", strconv.Itoa(n.redisRequests), "-d", "1024", "-t", "set,get", "--csv",
	}})
	if err != nil {
		return outcome{}, err
	}
	r, err := parseRedis(out)
	if err != nil {
		return outcome{}, err
	}
	// SET carries the value there, GET brings it back.
	return outcome{rate: r, bytes: 2 * 1024 * uint64(n.redisRequests)}, nil
}

func (ap *Applications) iperfApp(ctx context.Context) (outcome, error) {
	n := ap.sizes()
	out, err := ap.client.Run(ctx, lab.Command{Args: []string{
		"iperf3", "--client", ap.server.Addr4.String(), "--port", strconv.Itoa(portIperf), "--time", strconv.Itoa(n.iperfSeconds),
		"--parallel", strconv.Itoa(n.iperfStreams), "--json",
	}})
	o, perr := parseIperf(out)
	if perr != nil {
		err = perr // iperf3 says in JSON why it failed
	}
	return o, err
}

// once runs an application within its time.
func (ap *Applications) once(ctx context.Context, a app) (outcome, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, runTimeout, fmt.Errorf("no end after %v", runTimeout))
	defer cancel()
	o, err := a.run(ctx)
	if err != nil {
		return outcome{}, fmt.Errorf("%s: %w", a.name, err)
	}
	return o, nil
}

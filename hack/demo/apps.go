// SPDX-License-Identifier: Apache-2.0

package main

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

// sizes are how much each application does.
type sizes struct {
	fileBytes, smallBytes int64
	redisRequests         int
	redisClients          int
	iperfSeconds          int
	iperfStreams          int
}

func (o options) sizes() sizes {
	if o.quick {
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
func (d *demo) startServers(ctx context.Context) (err error) {
	n := d.opts.sizes()
	if d.bodies.large, err = makeBody(filepath.Join(d.server.Dir, "large"), n.fileBytes); err != nil {
		return err
	}
	if d.bodies.small, err = makeBody(filepath.Join(d.server.Dir, "small"), n.smallBytes); err != nil {
		return err
	}
	small, err := os.ReadFile(filepath.Join(d.server.Dir, "small"))
	if err != nil {
		return err
	}
	if err := writeFile(filepath.Join(d.legacy.Dir, "small"), string(small)); err != nil {
		return err
	}
	for _, p := range []*lab.Pod{d.server, d.legacy} {
		if err := startNginx(ctx, p); err != nil {
			return err
		}
	}
	if err := startServer(ctx, d.server, portRedis, "redis-server", "--port", strconv.Itoa(portRedis), "--save", "",
		"--appendonly", "no", "--protected-mode", "no", "--dir", d.server.Dir); err != nil {
		return err
	}
	return startServer(ctx, d.server, portIperf, "iperf3", "--server", "--port", strconv.Itoa(portIperf))
}

// An app is one application with its own way to say how fast it was.
type app struct {
	name string
	run  func(ctx context.Context) (outcome, error)
}

// outcome is what an application says about its run.
type outcome struct {
	rate rate
	// bytes is the payload that it moved at least.
	bytes uint64
	// wrong says what is wrong with what was received, if anything.
	wrong string
}

func (d *demo) apps() []app {
	n := d.opts.sizes()
	return []app{
		{fmt.Sprintf("nginx + curl, %s", byteCount(uint64(n.fileBytes))), func(ctx context.Context) (outcome, error) {
			return d.curl(ctx, d.server.Addr4.String(), "large", d.bodies.large)
		}},
		{fmt.Sprintf("nginx + curl, %s, IPv6", byteCount(uint64(n.fileBytes))), func(ctx context.Context) (outcome, error) {
			return d.curl(ctx, "["+d.server.Addr6.String()+"]", "large", d.bodies.large)
		}},
		{fmt.Sprintf("redis-benchmark, %d clients", n.redisClients), d.redisApp},
		{fmt.Sprintf("iperf3, %d streams", n.iperfStreams), d.iperfApp},
	}
}

// curl fetches a file from nginx and compares its checksum.
func (d *demo) curl(ctx context.Context, host, file string, want body, options ...string) (outcome, error) {
	h := sha256.New()
	url := fmt.Sprintf("http://%s:%d/%s", host, portHTTP, file)
	proc, err := d.client.Start(lab.Command{
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

func (d *demo) redisApp(ctx context.Context) (outcome, error) {
	n := d.opts.sizes()
	out, err := d.client.Run(ctx, lab.Command{Args: []string{
		"redis-benchmark", "-h", d.server.Addr4.String(), "-p", strconv.Itoa(portRedis), "-c", strconv.Itoa(n.redisClients),
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

func (d *demo) iperfApp(ctx context.Context) (outcome, error) {
	n := d.opts.sizes()
	out, err := d.client.Run(ctx, lab.Command{Args: []string{
		"iperf3", "--client", d.server.Addr4.String(), "--port", strconv.Itoa(portIperf), "--time", strconv.Itoa(n.iperfSeconds),
		"--parallel", strconv.Itoa(n.iperfStreams), "--json",
	}})
	o, perr := parseIperf(out)
	if perr != nil {
		err = perr // iperf3 says in JSON why it failed
	}
	return o, err
}

// once runs an application within its time.
func (d *demo) once(ctx context.Context, a app) (outcome, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, runTimeout, fmt.Errorf("no end after %v", runTimeout))
	defer cancel()
	o, err := a.run(ctx)
	if err != nil {
		return outcome{}, fmt.Errorf("%s: %w", a.name, err)
	}
	return o, nil
}

// shownAfter is when in the run of iperf3 links and connections are shown.
const shownAfter = 700 * time.Millisecond

// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
)

// process is a program that runs until the test ends.
type process struct {
	t       *testing.T
	cmd     *exec.Cmd
	metrics string // URL
}

// start runs a program until the test ends, and shows the end of its log if the
// test failed.
func start(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", cmd.Path, err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill() // it may have ended
		cmd.Wait()
		if t.Failed() {
			text := log.Bytes()
			t.Logf("the end of the log of %s:\n%s", filepath.Base(cmd.Path), text[max(0, len(text)-4000):])
		}
	})
	return &process{t: t, cmd: cmd}
}

// startKwok plays the kubelets.
func startKwok(t *testing.T, api *rest.Config) {
	t.Helper()
	dir, err := clustertools.Built()
	if err != nil {
		t.Fatal(err)
	}
	stages, err := filepath.Abs("testdata/kwok.yaml")
	if err != nil {
		t.Fatal(err)
	}
	start(t, exec.Command(filepath.Join(dir, "kwok"), "--kubeconfig", apiserver.Kubeconfig(t, api), "--manage-all-nodes",
		"--config", stages, "--cidr", "10.128.0.0/9", "--node-lease-duration-seconds", "0"))
}

// startController runs the program as users do, with the rights of an
// administrator.
func startController(t *testing.T, api *rest.Config) *process {
	t.Helper()
	testenv.Builds("cmd/controller")
	program := filepath.Join(t.TempDir(), "controller")
	if out, err := exec.Command("go", "build", "-o", program, "../../cmd/controller").CombinedOutput(); err != nil {
		t.Fatalf("build the controller: %v\n%s", err, out)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	p := start(t, exec.Command(program, "--kubeconfig", apiserver.Kubeconfig(t, api), "--namespace", system, "--leader-elect",
		"--metrics-address", address, "--metrics-auth=false", "--health-address=0", "--log-level=warn"))
	p.metrics = "http://" + address + "/metrics"
	return p
}

// measurement is what a process has used since it started.
type measurement struct {
	at     time.Time
	wall   time.Duration // of a difference
	cpu    time.Duration
	rssMiB int
	writes float64 // requests to the API server that were not for reading
}

func (m measurement) since(before measurement) measurement {
	return measurement{at: m.at, wall: m.at.Sub(before.at), cpu: m.cpu - before.cpu, rssMiB: m.rssMiB, writes: m.writes - before.writes}
}

func (m measurement) cores() float64 { return m.cpu.Seconds() / m.wall.Seconds() }
func (m measurement) rate() float64  { return m.writes / m.wall.Seconds() }

// clockTick is what /proc counts CPU time in; it is 100 per second on every
// Linux that Go runs on.
const clockTick = time.Second / 100

func (p *process) measure() measurement {
	p.t.Helper()
	m := measurement{at: time.Now()}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	// Behind the name in parentheses: state is field 3, utime 14, stime 15, rss 24.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+2:]))
	number := func(n int) int {
		v, err := strconv.Atoi(fields[n-3])
		if err != nil {
			p.t.Fatalf("field %d of /proc/PID/stat: %v", n, err)
		}
		return v
	}
	m.cpu = time.Duration(number(14)+number(15)) * clockTick
	m.rssMiB = number(24) * os.Getpagesize() >> 20

	resp, err := http.Get(p.metrics)
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	for line := range strings.Lines(string(body)) {
		if !strings.HasPrefix(line, "rest_client_requests_total{") || strings.Contains(line, `method="GET"`) {
			continue
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' ')+1:]), 64)
		if err != nil {
			p.t.Fatal(err)
		}
		m.writes += v
	}
	return m
}

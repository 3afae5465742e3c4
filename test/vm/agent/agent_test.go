// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
)

// Ports of the servers, and of what turns TCP into the kernel's SMC-R.
const (
	redisPort = 6379
	nginxPort = 8080
	peerPort  = 5000
	viaRedis  = 16379
	viaNginx  = 18080
)

// suite is a cluster of two nodes. A pod with servers is on the first one, and
// one with clients on each.
type suite struct {
	nodes        [2]*node
	server       *pod
	clients      [2]*pod
	nginx, redis string
}

// TestAgent is the product's own case. Traffic goes between node 0, whose pods
// are behind our agent, and node 1, which is a kernel with SMC-R and, in some
// subtests, has an agent too.
func TestAgent(t *testing.T) {
	s := newSuite(t)
	for _, sub := range []struct {
		name string
		run  func(*suite, *testing.T)
	}{
		{"kernelClient", (*suite).kernelClient},
		{"kernelServer", (*suite).kernelServer},
		{"twoAgents", (*suite).twoAgents},
		{"ownDevices", (*suite).ownDevices},
		{"deviceGone", (*suite).deviceGone},
		{"portDown", (*suite).portDown},
		{"addressMoved", (*suite).addressMoved},
		{"memoryRefused", (*suite).memoryRefused},
		{"agentKilled", (*suite).agentKilled},
		{"noRights", (*suite).noRights},
	} {
		t.Run(sub.name, func(t *testing.T) { sub.run(s, t) })
	}
}

func newSuite(t *testing.T) *suite {
	t.Helper()
	l := lab.ForTest(t, lab.Config{})
	ctx := t.Context()
	if err := drive.Build(ctx, l); err != nil {
		t.Fatal(err)
	}
	if err := l.BuildNode(ctx); err != nil {
		t.Fatal(err)
	}
	s := &suite{}
	for i := range s.nodes {
		s.nodes[i] = newNode(t, l.Guest(i), i)
		s.clients[i] = s.nodes[i].addPod(t, "client", 3)
	}
	s.server = s.nodes[0].addPod(t, "server", 2)
	s.redis = fmt.Sprintf("redis-server --port %d --bind 0.0.0.0 --save '' --protected-mode no", redisPort)
	s.nginx = "nginx -e stderr -p /tmp -c /run/nginx.conf"
	for _, n := range s.nodes {
		n.sh(t, fmt.Sprintf(`chmod 1777 /tmp; mkdir -p /run/www; head -c 4000000 /dev/urandom >/run/www/4M; cat >/run/nginx.conf <<-EOF
			daemon off; worker_processes 1; pid /tmp/nginx.pid; error_log stderr;
			events { worker_connections 64; }
			http { access_log off; sendfile on;
			client_body_temp_path /tmp/b; proxy_temp_path /tmp/p; fastcgi_temp_path /tmp/f; uwsgi_temp_path /tmp/u; scgi_temp_path /tmp/s;
			server { listen %d; root /run/www; } }
			EOF`, nginxPort))
	}
	s.server.start(t, redisPort, s.redis)
	s.server.start(t, nginxPort, s.nginx)
	s.nodes[0].startAgent(t, 2)
	return s
}

// counters are what the kernel of a node counted.
func (n *node) counters(t *testing.T) smcnl.Counters {
	t.Helper()
	k, err := drive.Kernel(t.Context(), n.Guest)
	if err != nil {
		t.Fatal(err)
	}
	return k.Counters
}

// viaKernel makes ports of node 1's loopback lead to an address over the
// kernel's SMC-R.
func (s *suite) viaKernel(t *testing.T, ports map[int]netip.AddrPort) {
	t.Helper()
	for port, to := range ports {
		s.nodes[1].sh(t, fmt.Sprintf(`socat TCP-LISTEN:%d,bind=127.0.0.1,fork,reuseaddr SOCKET-CONNECT:2:256:%s </dev/null >/run/socat-%[1]d.log 2>&1 &
			for i in $(seq 500); do ss -Hltn "sport = :%[1]d" | grep -q . && exit 0; sleep 0.1; done; exit 1`, port, sockaddr(to)))
	}
}

// sockaddr is an address as socat wants it: what follows the family.
func sockaddr(a netip.AddrPort) string {
	ip := a.Addr().As4()
	return fmt.Sprintf("x%04x%02x%02x%02x%02xx0000000000000000", a.Port(), ip[0], ip[1], ip[2], ip[3])
}

// kernelClient: redis and nginx in a pod behind our agent, the kernel's SMC-R as
// the client.
func (s *suite) kernelClient(t *testing.T) {
	pod, kernel := s.server, s.nodes[1]
	addr := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(pod.addr), port) }
	s.viaKernel(t, map[int]netip.AddrPort{viaRedis: addr(redisPort), viaNginx: addr(nginxPort)})
	want := s.nodes[0].sh(t, "sha256sum </run/www/4M")
	const peerTimeout = "5m" // of each script, as patience
	s.server.start(t, peerPort, fmt.Sprintf(lab.GuestBin+"/peer serve -stack tcp -listen 0.0.0.0:%d -timeout %s", peerPort, peerTimeout))
	s.counted(t, pod.node, func() error {
		_, err := kernel.try(t, fmt.Sprintf("redis-benchmark -h 127.0.0.1 -p %d -n 200 -c 3 -d 100 -t set,get -q", viaRedis))
		for i := 0; i < 2 && err == nil; i++ {
			err = kernel.get(t, "", fmt.Sprintf("http://127.0.0.1:%d", viaNginx), want)
		}
		if err != nil {
			return err
		}
		// An AF_SMC socket as smc_run makes it, with a check of every byte.
		ctx, cancel := context.WithDeadline(t.Context(), giveUp(t))
		defer cancel()
		rep, err := drive.Dial(ctx, kernel.Guest, "-stack", "kernel", "-to", addr(peerPort).String(), "-do", "echo,bulk:bytes=4M", "-conns", "2", "-timeout", peerTimeout)
		if rep != nil {
			err = errors.Join(err, rep.Check())
		}
		return err
	}, func(got counts) error {
		// The benchmark has one connection more for each kind of request.
		if k := got.kernel; k.ClientV2 < 2*3+2+2*2 || k.ClientFallbacks != 0 || k.ClientErrors != 0 {
			return fmt.Errorf("the kernel counted %+v, want all its connections on SMC-R", k)
		}
		if got.conns.TotalSMCR < got.kernel.ClientV2 {
			return fmt.Errorf("the agent counted %+v, the kernel %d", got.conns, got.kernel.ClientV2)
		}
		return nil
	})
}

// kernelServer: clients in a pod behind our agent, the kernel's SMC-R as the
// server of redis and nginx.
func (s *suite) kernelServer(t *testing.T) {
	client, kernel := s.clients[0], s.nodes[1]
	kernel.sh(t, fmt.Sprintf(`
		(cd /tmp; %s >/dev/null 2>&1 </dev/null & %s >/dev/null 2>&1 </dev/null &)
		socat SOCKET-LISTEN:2:256:%s,fork,reuseaddr TCP:127.0.0.1:%d </dev/null >/dev/null 2>&1 &
		socat SOCKET-LISTEN:2:256:%s,fork,reuseaddr TCP:127.0.0.1:%d </dev/null >/dev/null 2>&1 &
		for i in $(seq 500); do redis-cli -p %[4]d ping && curl -so /dev/null http://127.0.0.1:%[6]d/ && kernelsmc | grep -q LISTEN && exit 0; sleep 0.2; done; exit 1`,
		s.redis, s.nginx, sockaddr(netip.MustParseAddrPort("10.0.0.2:16379")), redisPort, sockaddr(netip.MustParseAddrPort("10.0.0.2:18080")), nginxPort))
	want := kernel.sh(t, "sha256sum </run/www/4M")
	s.counted(t, client.node, func() error {
		_, err := client.try(t, client.inPod()+fmt.Sprintf("redis-benchmark -h 10.0.0.2 -p %d -n 200 -c 3 -d 100 -t set,get -q", viaRedis))
		if err != nil {
			return err
		}
		return client.get(t, client.inPod(), fmt.Sprintf("http://10.0.0.2:%d", viaNginx), want)
	}, func(got counts) error {
		if k := got.kernel; k.ServerV2 < 2*3+1 || k.ServerFallbacks != 0 || k.ServerErrors != 0 {
			return fmt.Errorf("the kernel counted %+v, want all connections on SMC-R", k)
		}
		return nil
	})
}

// twoAgents: an agent on each node, both on soft RoCE by verbs. The devices'
// counters prove that the bytes went over RDMA.
func (s *suite) twoAgents(t *testing.T) {
	client, server := s.clients[1], s.server
	client.startAgent(t, 1)
	defer client.endAgent(t, unix.SIGTERM)
	packets := func() (n uint64) {
		_, err := fmt.Sscan(client.sh(t, "cat /sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts"), &n)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	var before uint64
	want := server.sh(t, "sha256sum </run/www/4M")
	s.counted(t, client.node, func() error {
		before = packets()
		_, err := client.try(t, client.inPod()+fmt.Sprintf("redis-benchmark -h %s -p %d -n 300 -c 5 -d 1000 -t set,get -q", server.addr, redisPort))
		if err != nil {
			return err
		}
		return client.get(t, client.inPod(), fmt.Sprintf("http://%s:%d", server.addr, nginxPort), want)
	}, func(got counts) error {
		if got.conns.TotalSMCR < 11 || got.conns.TotalTCP != 0 || len(got.reasons) > 0 {
			return fmt.Errorf("connections %+v, not on SMC-R because of %v", got.conns, got.reasons)
		}
		// Each request is a WRITE and a CDC message at least.
		if n := packets() - before; n < 2*600 {
			return fmt.Errorf("rxe0 sent %d packets", n)
		}
		return nil
	})
	st, err := client.status(t)
	if err != nil {
		t.Fatal(err)
	}
	if d := st.Devices[0]; d.Provider != "verbs" || d.Address != "10.0.0.2" || !strings.Contains(d.Choice, "configured") {
		t.Errorf("device %+v", d)
	}
}

// ping talks to redis in the pod over the kernel's SMC-R on node 1, and returns
// how many connections of it were on SMC-R and how many not.
func (s *suite) ping(t *testing.T) (smcr, tcp uint64, err error) {
	t.Helper()
	kernel := s.nodes[1]
	before := kernel.counters(t)
	out, err := kernel.try(t, fmt.Sprintf("timeout 60 redis-cli -p %d ping", viaRedis))
	if err == nil && out != "PONG" {
		err = fmt.Errorf("redis says %q", out)
	}
	got := kernel.counters(t).Sub(before)
	return got.ClientV2, got.ClientFallbacks, err
}

// awaitPing waits until redis answers, on SMC-R or not.
func (s *suite) awaitPing(t *testing.T, wantSMCR bool) {
	t.Helper()
	s.nodes[0].eventually(t, fmt.Sprintf("redis answers, on SMC-R: %t", wantSMCR), func() error {
		smcr, tcp, err := s.ping(t)
		if err == nil && (smcr != 0) != wantSMCR {
			err = fmt.Errorf("%d on SMC-R, %d on TCP", smcr, tcp)
		}
		return err
	})
}

// deviceGone: soft RoCE is removed while connections use it. Removing it does not
// wait for the agent; connections are TCP until it is back.
func (s *suite) deviceGone(t *testing.T) {
	n := s.nodes[0]
	s.awaitPing(t, true)
	load := s.nodes[1].load(t, n, 3, "redis-benchmark", "-p", fmt.Sprint(viaRedis), "-c", "3", "-n", "100000000", "-q")
	defer load.kill()
	ctx, cancel := context.WithDeadline(t.Context(), giveUp(t))
	defer cancel()
	start := time.Now()
	if err := n.RemoveRXE(ctx, 0); err != nil {
		t.Fatal(err)
	}
	t.Logf("removing the device took %v", time.Since(start))
	st := n.await(t, "the device is missing", func(st agentapi.Status) bool { return st.Devices[0].Missing != "" })
	if st.Accelerating || st.UnableCode != "NOSMCDEV" || st.Pods.Ready != 2 {
		t.Errorf("status %+v", st)
	}
	load.kill() // if it has not ended with its connections
	s.awaitPing(t, false)
	if err := n.AddRXE(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	n.await(t, "the device is back", func(st agentapi.Status) bool { return st.Devices[0].Missing == "" && st.Accelerating })
	s.awaitPing(t, true)
}

// portDown: the device's port loses its carrier and gets it back.
func (s *suite) portDown(t *testing.T) {
	n := s.nodes[0]
	port := func(want string) {
		t.Helper()
		n.await(t, "the port is "+want, func(st agentapi.Status) bool { return st.Devices[0].Port == want })
	}
	if err := n.SetLink(0, false); err != nil {
		t.Fatal(err)
	}
	port("DOWN")
	if err := n.SetLink(0, true); err != nil {
		t.Fatal(err)
	}
	port("ACTIVE")
	s.awaitPing(t, true)
}

// memoryRefused: an agent that may lock next to no memory says so, and
// connections are TCP.
func (s *suite) memoryRefused(t *testing.T) {
	n := s.nodes[0]
	n.endAgent(t, unix.SIGTERM)
	n.startAgent(t, 2, "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", "--memlock=65536:65536")
	s.awaitPing(t, false)
	n.await(t, "the refusal is shown", func(st agentapi.Status) bool {
		return strings.Contains(strings.Join(st.Problems, "\n"), "RLIMIT_MEMLOCK is 65536: give the container the capability IPC_LOCK")
	})
	n.endAgent(t, unix.SIGTERM)
	n.startAgent(t, 2)
	s.awaitPing(t, true)
}

// addressMoved: the address of the device's interface goes, and comes back.
func (s *suite) addressMoved(t *testing.T) {
	n := s.nodes[0]
	n.sh(t, "ip address del 10.0.0.1/24 dev eth0")
	n.await(t, "the port has no address", func(st agentapi.Status) bool { return st.Devices[0].Port == "DOWN" })
	n.sh(t, "ip address add 10.0.0.1/24 dev eth0; ip route replace 10.244.1.0/24 via 10.0.0.2")
	n.await(t, "the port has its address again", func(st agentapi.Status) bool { return st.Devices[0].Port == "ACTIVE" })
	s.awaitPing(t, true)
}

// agentKilled: connections go on as TCP without the agent, and on SMC-R with the
// next one.
func (s *suite) agentKilled(t *testing.T) {
	n := s.nodes[0]
	s.awaitPing(t, true)
	load := s.nodes[1].load(t, n, 3, "redis-benchmark", "-p", fmt.Sprint(viaRedis), "-c", "3", "-n", "100000000", "-q")
	defer load.kill()
	start := time.Now()
	n.endAgent(t, unix.SIGKILL)
	load.kill() // its connections were reset
	s.awaitPing(t, false)
	t.Logf("redis answered %v after the agent was killed", time.Since(start))
	n.startAgent(t, 2)
	s.awaitPing(t, true)
}

// noRights: the pod's processes have no capability and no device.
func (s *suite) noRights(t *testing.T) {
	out := s.server.sh(t, `for p in $(pidof redis-server); do
		grep CapEff /proc/$p/status; ls /proc/$p/root/dev/infiniband | wc -l; done`)
	want := "CapEff:\t0000000000000000\n0"
	if out != want {
		t.Errorf("rights of redis:\n%s\nwant\n%s", out, want)
	}
}

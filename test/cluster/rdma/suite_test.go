// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

const (
	// soon is for what takes seconds, in guests on a busy machine.
	soon = 2 * time.Minute

	// later is for what takes longer in a guest with VFs, where a pod's network takes many seconds, and is made anew when
	// a VF has not come back in time.
	later = 2 * soon

	// lookEvery is the pause between two looks at what is to happen. A look at a pod's log takes its emulated node
	// a sixth of a second, which it then lacks for that; clients log once a second.
	lookEvery = time.Second
)

// port is where pods serve.
const port = 7000

// A suite is one scenario's view of the cluster. Its methods end the scenario when something
// does not work.
type suite struct {
	*testing.T
	c *guest.Cluster
	p *product.Product

	plain *lab.Node      // n1, without RDMA devices
	hw    [2]*guest.Node // n2 and n3

	patience time.Duration // of eventually
}

func newSuite(t *testing.T, c *guest.Cluster, p *product.Product) *suite {
	if len(c.Guests) < 2 {
		t.Fatalf("cluster %s has %d guests, want 2", c.Name, len(c.Guests))
	}
	return &suite{T: t, c: c, p: p, plain: c.Nodes[0], hw: [2]*guest.Node{c.Guests[0], c.Guests[1]}, patience: soon}
}

// diagnose tells the state of the cluster if the scenario fails.
func (s *suite) diagnose() {
	if s.Failed() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		s.Logf("the cluster now:\n%s", s.p.Diagnose(ctx))
	}
}

func (s *suite) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// eventually waits until a condition returns nil.
func (s *suite) eventually(what string, condition func() error) {
	s.Helper()
	s.within(s.patience, what, condition)
}

// within is eventually for what takes longer.
func (s *suite) within(timeout time.Duration, what string, condition func() error) {
	s.Helper()
	s.must(product.EventuallyEvery(s.Context(), lookEvery, what, timeout, condition))
}

func (s *suite) get(ns, name string, o client.Object) error {
	return s.p.Client.Get(s.Context(), client.ObjectKey{Namespace: ns, Name: name}, o)
}

// accelerate waits until the agents of the guests say that they do.
func (s *suite) accelerate(ctx context.Context) error {
	for _, n := range s.hw {
		err := product.Eventually(ctx, "the agent of "+n.Name, soon, func() error { return s.p.WaitNode(ctx, n.Name) })
		if err != nil {
			return err
		}
	}
	return nil
}

// namespace makes a namespace that is opted in, unless it is there.
func (s *suite) namespace(name string) string {
	s.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{v1alpha1.AnnotationEnabled: "true"}}}
	s.must(client.IgnoreAlreadyExists(s.p.Client.Create(s.Context(), ns)))
	s.eventually("the service account of "+name, func() error { return s.get(name, "default", &corev1.ServiceAccount{}) })
	return name
}

// endNamespaces deletes namespaces and waits until they are gone, also after a failure.
func (s *suite) endNamespaces(names ...string) {
	s.Helper()
	args := append([]string{"delete", "namespace", "--ignore-not-found", "--timeout=" + soon.String()}, names...)
	if out, err := s.c.Kubectl(context.WithoutCancel(s.Context()), args...); err != nil {
		s.Error(out, err)
	}
}

// A pod is a pod that runs.
type pod struct {
	ns, name, node string
	ip             string
}

func (p pod) String() string { return p.ns + "/" + p.name }

func (p pod) address() string { return net.JoinHostPort(p.ip, fmt.Sprint(port)) }

// start makes a pod on a node, unless it is there, and waits until it runs. Without arguments it
// serves.
func (s *suite) start(ns, name string, node *lab.Node, args ...string) pod {
	s.Helper()
	o := podObject(ns, name, args...)
	o.Spec.NodeName = node.Name
	return s.run(o, node)
}

// podObject is a pod that no node has yet. Without arguments it serves.
func podObject(ns, name string, args ...string) *corev1.Pod {
	if len(args) == 0 {
		args = []string{"serve", fmt.Sprintf(":%d", port)}
	}
	grace, no := int64(0), false
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{"app": name}},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &grace, DNSPolicy: corev1.DNSDefault, AutomountServiceAccountToken: &no,
			Containers: []corev1.Container{{
				Name: "traffic", Image: product.Traffic, ImagePullPolicy: corev1.PullNever, Args: args,
			}},
		},
	}
}

// run makes a pod that is to be on a node, unless it is there, and waits until it runs.
func (s *suite) run(o *corev1.Pod, node *lab.Node) pod {
	s.Helper()
	began := time.Now()
	err := s.p.Client.Create(s.Context(), o)
	s.must(client.IgnoreAlreadyExists(err))
	p := s.running(pod{ns: o.Namespace, name: o.Name, node: node.Name})
	if err == nil {
		s.Logf("pod %s runs after %v", p, time.Since(began).Round(100*time.Millisecond))
	}
	return p
}

// running waits until a pod runs, and returns it with its address.
func (s *suite) running(p pod) pod {
	s.Helper()
	s.eventually("pod "+p.String(), func() error {
		var o corev1.Pod
		if err := s.get(p.ns, p.name, &o); err != nil {
			return err
		}
		ready := slices.ContainsFunc(o.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
		if !ready || o.Status.PodIP == "" {
			return fmt.Errorf("it is %s: %+v", o.Status.Phase, o.Status.ContainerStatuses)
		}
		p.ip = o.Status.PodIP
		return nil
	})
	return p
}

// pair makes a server on n2 and a client on n3 that does something with it, on SMC-R, or takes those
// of a former scenario: a pod of an emulated node takes seconds to start. A client that holds one
// connection is made again until that one is on SMC-R: on a busy machine the first rendezvous
// of two pods may take longer than it may.
func (s *suite) pair(command string) (server, client pod) {
	s.Helper()
	ns := s.namespace("test-" + command)
	server = s.start(ns, "server", s.hw[0].Node)
	s.status(server, v1alpha1.PodStatusEnabled)
	s.eventually("a client of "+server.String()+" on SMC-R", func() error {
		client = s.start(ns, "client", s.hw[1].Node, command, server.address(), "--interval="+interval[command], "--bytes=16384", "--workers=1")
		if command == load {
			return s.linked(client)
		}
		err := s.onSMCR(client, server)
		if err != nil && !errors.Is(err, errNoLink) {
			s.delete(client)
		}
		return err
	})
	s.status(client, v1alpha1.PodStatusEnabled)
	return server, client
}

// onSMCR returns nil if the one connection that a client holds is on SMC-R, and an error that wraps errNoLink if that
// is not known yet.
func (s *suite) onSMCR(client, server pod) error {
	err := s.linked(client)
	switch {
	case errors.Is(err, errNoLink) && s.ended(client):
		return errors.New("its connection is at its end")
	case err != nil:
		return err
	}
	e, err := s.explain(client, server)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", errNoLink, err)
	case slices.ContainsFunc(e.Live, func(c agentapi.Conn) bool { return c.Mode == "SMC-R" }):
		return nil
	}
	return fmt.Errorf("%s: %s", e.Code, e.Verdict)
}

// ended tells whether the connection that a client holds is at its end, as it is when a former scenario
// ended an agent.
func (s *suite) ended(client pod) bool {
	now, err := s.last(client)
	return err == nil && now.Ended
}

var (
	errNoLink = errors.New("no link is active")
	errPlain  = errors.New("its connections are plain TCP")
)

// linked returns nil if a pod has an active link, and its agent does not say that its connections
// are plain TCP. It asks the API server only: to run a program in a pod takes an emulated
// processor seconds, for which the first rendezvous would wait.
func (s *suite) linked(p pod) error {
	var o corev1.Pod
	var list v1alpha1.SMCRLinkList
	if err := errors.Join(s.get(p.ns, p.name, &o), s.p.Client.List(s.Context(), &list)); err != nil {
		return errors.Join(errNoLink, err)
	}
	if status := o.Annotations[v1alpha1.AnnotationStatus]; strings.HasPrefix(status, v1alpha1.PodStatusFallback) {
		return fmt.Errorf("%w: %s", errPlain, status)
	}
	for _, l := range list.Items {
		if l.Status.Pod == p.String() && l.Status.State == v1alpha1.LinkActive {
			return nil
		}
	}
	return errNoLink
}

// load is the command whose client makes connections all the time, and hold that of one which has
// one connection.
const (
	load = "load"
	hold = "hold"
)

// interval is the pause between two connections, or two exchanges. A pair that stays for the next
// scenarios leaves the emulated processors time for what these do.
var interval = map[string]string{load: "500ms", hold: "200ms"}

// delete deletes a pod and waits until it is gone.
func (s *suite) delete(p pod) {
	s.Helper()
	o := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.ns, Name: p.name}}
	s.must(client.IgnoreNotFound(s.p.Client.Delete(s.Context(), o)))
	s.eventually("the end of "+p.String(), func() error { return gone(s.get(p.ns, p.name, o)) })
}

// gone is an error unless that of a get says that there is no such object.
func gone(err error) error {
	if err == nil {
		return errors.New("it is there")
	}
	return client.IgnoreNotFound(err)
}

// status waits until the agent's annotation of a pod begins as wanted.
func (s *suite) status(p pod, want string) {
	s.Helper()
	s.eventually(fmt.Sprintf("the annotation %s=%s of %s", v1alpha1.AnnotationStatus, want, p), func() error {
		var o corev1.Pod
		if err := s.get(p.ns, p.name, &o); err != nil {
			return err
		}
		if got := o.Annotations[v1alpha1.AnnotationStatus]; !strings.HasPrefix(got, want) {
			return fmt.Errorf("it is %q", got)
		}
		return nil
	})
}

// once makes a connection, lets a message go there and back, and compares.
func (s *suite) once(from, to pod) error {
	_, err := s.c.Kubectl(s.Context(), "exec", "-n", from.ns, from.name, "--", "/usr/bin/traffic", "once", to.address())
	return err
}

// explain asks the agent of the client's node.
func (s *suite) explain(from, to pod) (agentapi.Explanation, error) {
	return s.explainOn(from.node, from.String(), to.address())
}

// explainOn asks the agent of a node. The source is a pod of that node, or an address.
func (s *suite) explainOn(node, from, to string) (agentapi.Explanation, error) {
	var e agentapi.Explanation
	text, err := s.p.SMCRCtl(s.Context(), node, "explain", "-o", "json", from, to)
	if text == "" {
		return e, err // exit code 4 is "not on SMC-R", with an answer
	}
	return e, json.Unmarshal([]byte(text), &e)
}

// verdict waits until the agent says a code of a client's connections, making connections.
func (s *suite) verdict(from, to pod, want agentapi.Code) {
	s.Helper()
	s.verdictOf(from.node, from, to, want)
}

// verdictOf is verdict by the agent of a node, the client's or the server's.
func (s *suite) verdictOf(node string, from, to pod, want agentapi.Code) {
	s.Helper()
	s.eventually(fmt.Sprintf("%s of connections of %s to %s", want, from, to), func() error {
		if err := s.once(from, to); err != nil {
			return err
		}
		e, err := s.explainOn(node, from.ip, to.address())
		if err == nil && e.Code != want {
			err = fmt.Errorf("%s: %s", e.Code, e.Verdict)
		}
		return err
	})
}

// link waits for an active SMCRLink of a pod with that redundancy, and returns it.
func (s *suite) link(p pod, want v1alpha1.Redundancy) v1alpha1.SMCRLink {
	s.Helper()
	var found v1alpha1.SMCRLink
	s.eventually(fmt.Sprintf("an active SMCRLink of %s that is %s", p, want), func() error {
		var list v1alpha1.SMCRLinkList
		if err := s.p.Client.List(s.Context(), &list); err != nil {
			return err
		}
		var seen []string
		for _, l := range list.Items {
			if l.Status.Pod != p.String() {
				continue
			}
			if l.Status.State == v1alpha1.LinkActive && l.Status.Redundancy == want {
				found = l
				return nil
			}
			seen = append(seen, fmt.Sprintf("%s is %s and %s on %s", l.Name, l.Status.State, l.Status.Redundancy, l.Status.Devices))
		}
		return fmt.Errorf("there are %q", seen)
	})
	return found
}

// event waits for an event of an object.
func (s *suite) event(name, reason string) {
	s.Helper()
	s.eventSays(name, reason, "")
}

// eventSays waits for one with that in its message.
func (s *suite) eventSays(name, reason, text string) {
	s.Helper()
	s.eventually(fmt.Sprintf("the event %s of %s", reason, name), func() error {
		var list corev1.EventList
		if err := s.p.Client.List(s.Context(), &list); err != nil {
			return err
		}
		var seen []string
		for _, e := range list.Items {
			if e.InvolvedObject.Name != name {
				continue
			}
			if e.Reason == reason && strings.Contains(e.Message, text) {
				return nil
			}
			seen = append(seen, e.Reason+" "+e.Message)
		}
		return fmt.Errorf("there are %q", seen)
	})
}

// A sum is a line of the command traffic.
type sum struct {
	OK          int            `json:"ok"`
	Failed      int            `json:"failed"`
	Errors      map[string]int `json:"errors"`
	WorstMillis int64          `json:"worstMillis"`
	Ended       bool           `json:"ended"`
}

// last is the last line of a pod's log.
func (s *suite) last(p pod) (sum, error) {
	one := int64(1)
	text, err := s.p.Clientset.CoreV1().Pods(p.ns).GetLogs(p.name, &corev1.PodLogOptions{TailLines: &one}).DoRaw(s.Context())
	if err != nil {
		return sum{}, err
	}
	var now sum
	if err := json.Unmarshal(bytes.TrimSpace(text), &now); err != nil {
		return sum{}, fmt.Errorf("log of %s: %q: %w", p, text, err)
	}
	return now, nil
}

// soFar waits until a client has said what it has done. A changed policy of a former scenario may have reset a connection
// of one that makes connections all the time.
func (s *suite) soFar(p pod) (now sum) {
	s.Helper()
	s.eventually("what "+p.String()+" says", func() (err error) {
		now, err = s.last(p)
		return err
	})
	return now
}

// grows waits until a client has done n more than before, and returns its new sum. None may have
// failed since.
func (s *suite) grows(p pod, before sum, n int) sum {
	s.Helper()
	var now sum
	s.eventually(fmt.Sprintf("%d more of %s", n, p), func() error {
		var err error
		if now, err = s.last(p); err == nil && now.OK < before.OK+n && now.Failed == before.Failed {
			err = fmt.Errorf("it has %+v", now)
		}
		return err
	})
	if now.Failed > before.Failed || now.Ended {
		s.Fatalf("%s has %+v, and had %+v", p, now, before)
	}
	return now
}

// queuePair is a line of what a kernel says of a reliable connection: link rxe0/1 lqpn 18 ... type RC state RTS ... comm
// node-agent. One without a comm is that of a thread that has ended, and the kernel's own have it in brackets.
var queuePair = regexp.MustCompile(`(?m)^link (\w+)/\d+ .*\btype RC state (\w+) (.*)$`)

// queuePairs counts, by device, the reliable connections of the agent that the node's kernel has
// ready to send.
func (s *suite) queuePairs(n *guest.Node) (map[string]int, error) {
	out, err := n.Run(s.Context(), "rdma", "resource", "show", "qp")
	if err != nil {
		return nil, err
	}
	count := map[string]int{}
	for _, m := range queuePair.FindAllStringSubmatch(out, -1) {
		if m[2] == "RTS" && !strings.Contains(m[3], "comm [") {
			count[m[1]]++
		}
	}
	return count, nil
}

// carries waits until the kernel of a node has queue pairs of the agent on exactly these devices.
func (s *suite) carries(n *guest.Node, devices ...string) {
	s.Helper()
	s.eventually(fmt.Sprintf("queue pairs on %q of %s", devices, n.Name), func() error {
		count, err := s.queuePairs(n)
		if err != nil {
			return err
		}
		for _, d := range devices {
			if count[d] == 0 {
				err = errors.Join(err, fmt.Errorf("there is none on %s", d))
			}
		}
		if len(count) != len(devices) {
			err = errors.Join(err, fmt.Errorf("there are %v", count))
		}
		return err
	})
}

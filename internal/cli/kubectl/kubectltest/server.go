// SPDX-License-Identifier: Apache-2.0

package kubectltest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/rest"
	"k8s.io/streaming/pkg/httpstream/wsstream"
)

// Exec is what a command in a pod prints, and its exit code.
type Exec func(pod string, command []string) (stdout, stderr string, code int)

// Server is the API server. Change its fields before the first request.
type Server struct {
	// Objects are JSON texts by their path, such as /api/v1/namespaces/shop.
	// Lists are made of them.
	Objects map[string]string
	Exec    Exec
	// Patched gets the path and the body of each PATCH of an object that there is.
	Patched func(path, body string)
	// Forbidden are parts of paths that nobody may use.
	Forbidden []string
}

// Start runs a server until the test ends, and says how to reach it.
func (s *Server) Start(t testing.TB) *rest.Config {
	t.Helper()
	h := httptest.NewServer(s)
	t.Cleanup(h.Close)
	return &rest.Config{Host: h.URL}
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	for _, f := range s.Forbidden {
		if strings.Contains(path, f) {
			refuse(w, http.StatusForbidden, metav1.StatusReasonForbidden, path+" is forbidden")
			return
		}
	}
	if pod, ok := strings.CutSuffix(path, "/exec"); ok {
		s.exec(w, r, strings.ReplaceAll(strings.TrimPrefix(pod, "/api/v1/namespaces/"), "/pods/", "/"))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if text, ok := s.Objects[path]; ok {
		if r.Method == http.MethodPatch && s.Patched != nil {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				panic(err)
			}
			s.Patched(path, string(body))
		}
		_, _ = fmt.Fprint(w, text)
		return
	}
	if items, ok := s.list(path, r.URL.Query()); ok {
		items, next := page(items, r.URL.Query())
		_, _ = fmt.Fprintf(w, `{"metadata":{"continue":%q},"items":[%s]}`, next, strings.Join(items, ","))
		return
	}
	refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound, path+" not found")
}

// page returns the part of a list that is asked for, and what to ask for next.
func page(items []string, q url.Values) (part []string, next string) {
	slices.Sort(items)
	from, _ := strconv.Atoi(q.Get("continue"))
	limit, _ := strconv.Atoi(q.Get("limit"))
	if end := from + limit; limit > 0 && end < len(items) {
		return items[from:end], strconv.Itoa(end)
	}
	return items[from:], ""
}

// list returns the objects of a collection: /api/v1/pods is that of all
// namespaces.
func (s *Server) list(path string, q url.Values) (items []string, ok bool) {
	i := strings.LastIndex(path, "/")
	kind := path[i+1:]
	if !slices.Contains([]string{"pods", "services", "endpointslices", "daemonsets"}, kind) {
		return nil, false
	}
	sel, err := labels.Parse(q.Get("labelSelector"))
	if err != nil {
		return nil, false
	}
	for name, text := range s.Objects {
		j := strings.LastIndex(name, "/")
		inOne := name[:j] == path
		inAll := strings.HasSuffix(name[:j], "/"+kind) && strings.HasPrefix(name, path[:i]+"/namespaces/")
		var o struct {
			Metadata metav1.ObjectMeta `json:"metadata"`
			Spec     struct {
				NodeName string `json:"nodeName"`
			} `json:"spec"`
			Status struct {
				PodIP string `json:"podIP"`
				Phase string `json:"phase"`
			} `json:"status"`
		}
		if !inOne && !inAll || json.Unmarshal([]byte(text), &o) != nil || !sel.Matches(labels.Set(o.Metadata.Labels)) {
			continue
		}
		field, want, _ := strings.Cut(q.Get("fieldSelector"), "=")
		if has, known := map[string]string{"spec.nodeName": o.Spec.NodeName, "status.podIP": o.Status.PodIP, "status.phase": o.Status.Phase}[field]; known && has != want {
			continue
		}
		items = append(items, text)
	}
	return items, true
}

func refuse(w http.ResponseWriter, code int, reason metav1.StatusReason, text string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status:   metav1.StatusFailure, Code: int32(code), Reason: reason, Message: text,
	})
}

// exec speaks the protocol of remote commands over a WebSocket.
func (s *Server) exec(w http.ResponseWriter, r *http.Request, pod string) {
	c := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{"v5.channel.k8s.io": {
		Binary: true,
		Channels: []wsstream.ChannelType{
			wsstream.IgnoreChannel, wsstream.WriteChannel, wsstream.WriteChannel, wsstream.WriteChannel, wsstream.IgnoreChannel,
		},
	}})
	_, streams, err := c.Open(w, r)
	if err != nil {
		return // answered
	}
	defer func() { _ = c.Close() }()
	out, errOut, code := s.Exec(pod, r.URL.Query()["command"])
	_, _ = streams[1].Write([]byte(out))
	_, _ = streams[2].Write([]byte(errOut))
	status := metav1.Status{Status: metav1.StatusSuccess}
	if code != 0 {
		status = metav1.Status{
			Status: metav1.StatusFailure, Reason: "NonZeroExitCode", Message: fmt.Sprintf("command terminated with exit code %d", code),
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: "ExitCode", Message: fmt.Sprint(code)}}},
		}
	}
	_ = json.NewEncoder(streams[3]).Encode(status)
}

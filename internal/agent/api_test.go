// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"strings"
	"testing"
)

func TestAPI(t *testing.T) {
	b := newBench(t, "", preferAll)
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	exchange(t, b.dial(p, 0), 10)
	eventually(t, func() string {
		if b.status().Conns.Live != 0 {
			return "the connection does not end"
		}
		return ""
	})

	tests := []struct {
		path string
		code int
		want string
	}{
		{"/v1/status", 200, `"apiVersion":"smcr.io/agent/v1"`},
		{"/v1/status", 200, `"roomConns":`},
		{"/v1/links", 200, `"error":"EOF"`},
		{"/v1/conns", 200, `"conns":[]`},
		{"/v1/conns?pod=test/a", 200, `"conns":[]`},
		{"/v1/conns?pod=a", 400, "want NAMESPACE/NAME"},
		{"/v1/attachments", 200, `"state":"ready"`},
		{"/v1/explain?src=test/a&dst=" + p.dst.String(), 200, `"code":""`},
		{"/v1/explain?src=127.0.0.1&dst=" + p.dst.String(), 200, `"code":""`},
		{"/v1/explain?src=test/a&dst=192.0.2.1:1", 200, `"code":"UNSEEN"`},
		{"/v1/explain?src=198.51.100.1&dst=192.0.2.1:1", 200, `"code":"NOT_ATTACHED"`},
		{"/v1/explain?src=a&dst=192.0.2.1:1", 400, "want an address"},
		{"/v1/explain?src=test/a&dst=192.0.2.1", 400, "want ADDRESS:PORT"},
		{"/v1/attachments/sync", 405, ""},
		{"/v2/status", 404, ""},
		{"/metrics", 200, `kube_smcr_connections_total{direction="outbound",mode="SMC-R"} 1`},
		{"/metrics", 200, `kube_smcr_pods{state="ready"} 1`},
		{"/metrics", 200, `kube_smcr_relayed_bytes_total{mode="TCP"} 0`},
		{"/metrics", 200, `kube_smcr_link_groups{redundancy="Symmetric"} 0`},
		{"/metrics", 200, `kube_smcr_budget_memory_bytes 4.294967296e+09`},
	}
	for _, tt := range tests {
		t.Run(tt.path, func(t *testing.T) {
			if code, body := b.get(tt.path); code != tt.code || !strings.Contains(body, tt.want) {
				t.Errorf("%d %s, want %d with %q", code, body, tt.code, tt.want)
			}
		})
	}
}

func TestAPI_refusesOthers(t *testing.T) {
	b := newBench(t, "", preferAll)
	var allow func(uint32) bool
	b.cfg.mayUseAPI = func(uid uint32) bool { return allow == nil || allow(uid) }
	b.start()
	b.client.Close()
	allow = func(uid uint32) bool { return uid != uint32(os.Getuid()) }
	_, err := b.client.Status(t.Context())
	if err == nil || !strings.Contains(err.Error(), "may not use this socket") {
		t.Errorf("Status = %v", err)
	}
	allow = nil
	if mayUseAPI(uint32(os.Getuid())+1) && os.Getuid() != 0 || !mayUseAPI(0) {
		t.Error("mayUseAPI is wrong")
	}
}

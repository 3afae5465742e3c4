// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
)

var server = apiserver.Shared{Bare: true}

func TestMain(m *testing.M) { os.Exit(server.Main(m)) }

// TestAPIServer: a real API server says whose a token is and what he may, to a
// guard that has the rights of the chart and no other.
func TestAPIServer(t *testing.T) {
	ctx, config := t.Context(), server.Config(t)
	admin, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	role := func(name string, subject rbacv1.Subject, rules ...rbacv1.PolicyRule) {
		t.Helper()
		meta := metav1.ObjectMeta{Name: name}
		if _, err := admin.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: rules}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		_, err := admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: meta, Subjects: []rbacv1.Subject{subject}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	token := func(name string) string {
		t.Helper()
		accounts := admin.CoreV1().ServiceAccounts(metav1.NamespaceDefault)
		if _, err := accounts.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		got, err := accounts.CreateToken(ctx, name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return got.Status.Token
	}
	role("metrics-reader", rbacv1.Subject{Kind: "ServiceAccount", Namespace: metav1.NamespaceDefault, Name: "prometheus"},
		rbacv1.PolicyRule{NonResourceURLs: []string{Path}, Verbs: []string{"get"}})
	role("own-metrics-reader", rbacv1.Subject{Kind: "ServiceAccount", Namespace: metav1.NamespaceDefault, Name: "reader"},
		rbacv1.PolicyRule{NonResourceURLs: []string{OwnPath}, Verbs: []string{"get"}})
	role("agent", rbacv1.Subject{Kind: "User", APIGroup: rbacv1.GroupName, Name: "agent"},
		rbacv1.PolicyRule{APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"tokenreviews"}, Verbs: []string{"create"}},
		rbacv1.PolicyRule{APIGroups: []string{"authorization.k8s.io"}, Resources: []string{"subjectaccessreviews"}, Verbs: []string{"create"}})
	limited := rest.CopyConfig(config)
	limited.Impersonate = rest.ImpersonationConfig{UserName: "agent"}
	guard, err := NewGuard(limited, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	h := guard.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }))
	for _, tt := range []struct {
		name, token string
		want        int
	}{
		{"an account that may", token("prometheus"), http.StatusOK},
		{"an account that may read these metrics and no others", token("reader"), http.StatusOK},
		{"an account that may not", token("somebody"), http.StatusForbidden},
		{"junk", "junk", http.StatusUnauthorized},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req := httptest.NewRequest(http.MethodGet, Path, http.NoBody)
			req.Header.Set("Authorization", "Bearer "+tt.token)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, req)
			if w.Code != tt.want {
				t.Errorf("status %d, want %d: %s", w.Code, tt.want, w.Body)
			}
		})
	}
}

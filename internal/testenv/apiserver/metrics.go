// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// MetricsAreGuarded checks that a program gives the metrics of kube-smcr at an address
// to an account of a namespace that may get /metrics, and to nobody else.
func MetricsAreGuarded(t testing.TB, admin *rest.Config, namespace, address string) {
	t.Helper()
	c, err := kubernetes.NewForConfig(admin)
	if err != nil {
		t.Fatal(err)
	}
	role := &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "metrics-reader-" + namespace},
		Rules:      []rbacv1.PolicyRule{{NonResourceURLs: []string{"/metrics"}, Verbs: []string{"get"}}},
	}
	if _, err := c.RbacV1().ClusterRoles().Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: role.ObjectMeta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: namespace, Name: "prometheus"}},
	}
	if _, err := c.RbacV1().ClusterRoleBindings().Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	client := http.Client{
		Timeout:   startTimeout,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}, // nobody signed the certificate
	}
	defer client.CloseIdleConnections()
	for _, tt := range []struct {
		who, url, token string
		code            int
	}{
		{"nobody", "https://", "", http.StatusUnauthorized},
		{"junk", "https://", "junk", http.StatusUnauthorized},
		{"an account that may not", "https://", tokenOf(t, c, namespace, "somebody"), http.StatusForbidden},
		{"an account that may", "https://", tokenOf(t, c, namespace, "prometheus"), http.StatusOK},
		{"an account that may, without TLS", "http://", "junk", http.StatusBadRequest},
	} {
		err := fmt.Errorf("no answer")
		for deadline := time.Now().Add(startTimeout); time.Now().Before(deadline); {
			if err = ask(t.Context(), &client, tt.url+address+"/metrics", tt.token, tt.code); err == nil {
				break
			}
			time.Sleep(50 * time.Millisecond) // polls the program
		}
		if err != nil {
			t.Errorf("metrics for %s: %v", tt.who, err)
		}
	}
}

// tokenOf makes an account and returns a token of it.
func tokenOf(t testing.TB, c kubernetes.Interface, namespace, name string) string {
	t.Helper()
	accounts := c.CoreV1().ServiceAccounts(namespace)
	if _, err := accounts.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	got, err := accounts.CreateToken(t.Context(), name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return got.Status.Token
}

func ask(ctx context.Context, client *http.Client, url, token string, want int) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return err
	}
	given := strings.Contains(string(body), "kube_smcr_")
	if resp.StatusCode != want || given != (want == http.StatusOK) {
		return fmt.Errorf("%s, metrics given: %v, want %d", resp.Status, given, want)
	}
	return nil
}

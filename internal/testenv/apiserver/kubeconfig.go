// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"os"
	"path/filepath"
	"testing"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Kubeconfig writes a file by which programs reach what c reaches, and returns
// its path.
func Kubeconfig(t testing.TB, c *rest.Config) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{"c": {Server: c.Host, CertificateAuthorityData: c.CAData}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"u": {
			ClientCertificateData: c.CertData, ClientKeyData: c.KeyData, Token: c.BearerToken,
		}},
		Contexts:       map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "x",
	}, file)
	if err == nil {
		err = os.Chmod(file, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return file
}

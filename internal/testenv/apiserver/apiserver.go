// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	"github.com/smcr-io/kube-smcr/config/crd"
	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
)

// startTimeout is for a machine that builds and tests other packages meanwhile.
const startTimeout = 5 * time.Minute

// Shared is the API server of all tests of a package.
type Shared struct {
	// Bare leaves the CRDs out.
	Bare bool

	once    sync.Once
	env     *envtest.Environment
	scratch string // holds the wrappers of the programs
	err     error
}

// Main runs the tests and stops the server.
func (s *Shared) Main(m *testing.M) int {
	code := m.Run()
	if err := s.stop(); err != nil {
		fmt.Fprintln(os.Stderr, "stop the API server:", err)
		code = max(code, 1)
	}
	return code
}

// Config starts the server if no test has yet, and returns how an
// administrator connects to it. The caller may change what it gets.
func (s *Shared) Config(t testing.TB) *rest.Config {
	t.Helper()
	testenv.Need(t, testenv.ClusterTools)
	s.once.Do(func() {
		// The programs end with the thread that starts them (wrap). One that is
		// kept does not end when code under test changes a thread's namespace.
		done := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			s.start()
			close(done)
			select {}
		}()
		<-done
	})
	if s.err != nil {
		t.Fatalf("start the API server: %v", s.err)
	}
	return rest.CopyConfig(s.env.Config)
}

func (s *Shared) start() {
	dir, err := clustertools.Built()
	if err != nil {
		s.err = err
		return
	}
	if s.scratch, err = os.MkdirTemp("", "apiserver"); err != nil {
		s.err = err
		return
	}
	for _, name := range []string{"etcd", "kube-apiserver", "kubectl"} {
		if err := wrap(filepath.Join(dir, name), filepath.Join(s.scratch, name)); err != nil {
			s.err = err
			return
		}
	}
	env := &envtest.Environment{
		BinaryAssetsDirectory:    s.scratch,
		ControlPlaneStartTimeout: startTimeout,
		ControlPlaneStopTimeout:  startTimeout,
	}
	// Set here, so that an environment variable has no say in which programs run.
	env.ControlPlane.GetAPIServer().Path = filepath.Join(s.scratch, "kube-apiserver")
	// Nodes have the rights of nodes, as in every cluster.
	env.ControlPlane.GetAPIServer().Configure().Set("authorization-mode", "Node", "RBAC")
	env.ControlPlane.Etcd = &envtest.Etcd{Path: filepath.Join(s.scratch, "etcd")}
	env.ControlPlane.KubectlPath = filepath.Join(s.scratch, "kubectl")
	if !s.Bare {
		if env.CRDs, s.err = Definitions(); s.err != nil {
			return
		}
	}
	s.env = env
	if _, err := env.Start(); err != nil {
		s.err = err
	}
}

func (s *Shared) stop() error {
	var err error
	if s.env != nil {
		err = s.env.Stop()
	}
	if s.scratch != "" {
		err = errors.Join(err, os.RemoveAll(s.scratch))
	}
	return err
}

// wrap makes a script that runs program so that it ends with the test, however
// that ends, and with a collector of garbage that has a quarter of the work: most of what an API
// server computes in a test it computes when it starts.
func wrap(program, script string) error {
	run := fmt.Sprintf("exec '%s' \"$@\"\n", program)
	if setpriv, err := exec.LookPath("setpriv"); err == nil {
		run = fmt.Sprintf("exec '%s' --pdeathsig KILL '%s' \"$@\"\n", setpriv, program)
	}
	return os.WriteFile(script, []byte("#!/bin/sh\nexport GOGC=400\n"+run), 0o700)
}

// Definitions returns the CRDs of this project.
func Definitions() ([]*apiextensionsv1.CustomResourceDefinition, error) {
	files := crd.Files()
	names, err := fs.Glob(files, "*.yaml")
	if err != nil {
		return nil, fmt.Errorf("list the CRDs: %w", err)
	}
	var out []*apiextensionsv1.CustomResourceDefinition
	for _, name := range names {
		data, err := files.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("read a CRD: %w", err)
		}
		def := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(data, def); err != nil {
			return nil, fmt.Errorf("parse %s: %w", name, err)
		}
		out = append(out, def)
	}
	if len(out) == 0 {
		return nil, errors.New("no CRD is embedded in config/crd")
	}
	return out, nil
}

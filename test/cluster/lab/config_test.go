// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
)

func TestValidate(t *testing.T) {
	good := Config{Name: "x-1", Nodes: 2, ProxyMode: "iptables"}
	tests := []struct {
		name   string
		change func(*Config)
		want   string
	}{
		{name: "good", change: func(*Config) {}},
		{name: "name with a slash", change: func(c *Config) { c.Name = "../x" }, want: `"../x"`},
		{name: "long name", change: func(c *Config) { c.Name = strings.Repeat("x", maxNameLen+1) }, want: "24"},
		{name: "too many nodes", change: func(c *Config) { c.Nodes = maxNodes + 1 }, want: "10 nodes"},
		{name: "too many external nodes", change: func(c *Config) { c.External = maxNodes - 1 }, want: "2 nodes and 8 external"},
		{name: "only external nodes", change: func(c *Config) { c.Nodes, c.External = -1, 3 }, want: "3 external"},
		{name: "fewer nodes than one", change: func(c *Config) { c.Nodes = -1 }, want: "-1 nodes"},
		{name: "unknown proxy", change: func(c *Config) { c.ProxyMode = "ipvs" }, want: `"ipvs"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := good
			tt.change(&c)
			err := c.validate()
			if (err != nil) != (tt.want != "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("validate() = %v, want %q", err, tt.want)
			}
		})
	}
}

func TestHasCapability(t *testing.T) {
	status := "Name:\tx\nCapPrm:\tffffffffffffffff\nCapEff:\t000001fffeffffff\n"
	if hasCapability(status, unix.CAP_SYS_RESOURCE) {
		t.Error("found CAP_SYS_RESOURCE where it is missing")
	}
	if !hasCapability(status, unix.CAP_NET_ADMIN) {
		t.Error("did not find CAP_NET_ADMIN")
	}
}

// TestClaim covers the life of a cluster's directory: claimed, in use, left by
// a dead cluster, claimed again.
func TestClaim(t *testing.T) {
	t.Setenv(clustertools.CacheEnv, t.TempDir())
	name := "claim-test" // its cgroup does not exist
	dir, lock, err := claim(name)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := claim(name); !errors.Is(err, errInUse) {
		t.Errorf("claim() of a claimed name: %v, want %v", err, errInUse)
	}
	if err := writeFile(dir, configFile, []byte("{}")); err != nil {
		t.Fatal(err)
	}
	if err := Sweep(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, configFile)); err != nil {
		t.Errorf("Sweep() removed the directory of a living cluster: %v", err)
	}

	if err := lock.Close(); err != nil { // the cluster dies
		t.Fatal(err)
	}
	dir, lock, err = claim(name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, configFile)); err == nil {
		t.Error("claim() left what a dead cluster had")
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Sweep(); err != nil {
		t.Error(err)
	}
	if names, err := List(); err != nil || len(names) > 0 {
		t.Errorf("List() = %q, %v after Sweep; want nothing", names, err)
	}
}

// A directory that no cluster made is not taken for one that a dead cluster left.
func TestSweep_leavesOthersAlone(t *testing.T) {
	cache := t.TempDir()
	t.Setenv(clustertools.CacheEnv, cache)
	theirs := filepath.Join(cache, "clusters", "Not a cluster")
	if err := os.MkdirAll(theirs, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Sweep(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(theirs); err != nil {
		t.Error(err)
	}
}

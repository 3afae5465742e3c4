// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"smcr-cni": main})
}

// TestScripts runs every script with every version of CNI. $V is the version;
// [check] and [v1.1] hold for versions that have CHECK, and GC with STATUS.
func TestScripts(t *testing.T) {
	defer goleak.VerifyNone(t)
	for _, v := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(v, func(t *testing.T) {
			testscript.Run(t, testscript.Params{
				Dir:                 "testdata/script",
				RequireExplicitExec: true,
				Setup: func(e *testscript.Env) error {
					e.Vars = append(e.Vars, "V="+v, "DATA="+e.WorkDir+"/data",
						"CNI_PATH=/none", "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0",
						// The namespace is never entered, so the test's own will do.
						"CNI_NETNS=/proc/self/ns/net", "CNI_NETNS_OVERRIDE=1")
					return nil
				},
				Condition: func(cond string) (bool, error) {
					switch cond {
					case "v1.1":
						return v == "1.1.0", nil
					case "check":
						return v != "0.3.1", nil
					case "root":
						return os.Getuid() == 0, nil
					}
					return false, fmt.Errorf("unknown condition %q", cond)
				},
				Cmds: map[string]func(*testscript.TestScript, bool, []string){
					"conf": conf, "cni": plugin, "agent": agent, "field": field, "fulldisk": fullDisk, "errcode": errCode,
					"deadsocket": deadSocket,
				},
			})
		})
	}
}

const prevResult = `{"cniVersion":"$V","interfaces":[{"name":"br0"},{"name":"eth0","sandbox":"/ns"}],
 "ips":[{"interface":1,"address":"10.1.2.3/24","version":"4"},{"interface":1,"address":"fd00::3/64","version":"6"}],
 "dns":{},"x-unknown":{"big":12345678901234567890}}`

// conf [JSON] writes the configuration conf.json: the default one, with the
// keys of JSON added or replaced; a key that is null is taken away.
func conf(ts *testscript.TestScript, neg bool, args []string) {
	m := map[string]json.RawMessage{}
	expand := func(s string) string { return os.Expand(s, ts.Getenv) }
	base := fmt.Sprintf(`{"cniVersion":"$V","name":"podnet","type":"smcr-cni","dataDir":"$DATA","prevResult":%s}`, prevResult)
	ts.Check(json.Unmarshal([]byte(expand(base)), &m))
	if len(args) > 0 {
		var extra map[string]json.RawMessage
		ts.Check(json.Unmarshal([]byte(expand(strings.Join(args, " "))), &extra))
		for k, v := range extra {
			if m[k] = v; string(v) == "null" {
				delete(m, k)
			}
		}
	}
	b, err := json.Marshal(m)
	ts.Check(err)
	ts.Check(os.WriteFile(ts.MkAbs("conf.json"), b, 0o600))
	if r, ok := m["prevResult"]; ok {
		var prev bytes.Buffer // as Marshal puts it into conf.json
		ts.Check(json.Compact(&prev, r))
		ts.Check(os.WriteFile(ts.MkAbs("prev.json"), append(prev.Bytes(), '\n'), 0o600))
	}
}

// plugin is the command "cni VERB": it runs the plugin with conf.json.
func plugin(ts *testscript.TestScript, neg bool, args []string) {
	in, err := os.ReadFile(ts.MkAbs("conf.json"))
	ts.Check(err)
	ts.Setenv("CNI_COMMAND", args[0])
	ts.Check(os.WriteFile(ts.MkAbs("stdin"), in, 0o600))
	out, errb, code := run(ts, in)
	ts.Check(os.WriteFile(ts.MkAbs("out"), out, 0o600))
	ts.Check(os.WriteFile(ts.MkAbs("err"), errb, 0o600))
	ts.Logf("smcr-cni %s: exit %d\n%s%s", args[0], code, out, errb)
	if neg != (code != 0) {
		ts.Fatalf("smcr-cni %s: exit code %d", args[0], code)
	}
}

// errcode CODE TEXT... wants the CNI error in out to have the code and to name
// each text.
func errCode(ts *testscript.TestScript, neg bool, args []string) {
	var e struct {
		Code         int
		Msg, Details string
	}
	b, err := os.ReadFile(ts.MkAbs("out"))
	ts.Check(err)
	ts.Check(json.Unmarshal(b, &e))
	if fmt.Sprint(e.Code) != args[0] {
		ts.Fatalf("error code %d, want %s: %s", e.Code, args[0], b)
	}
	for _, text := range args[1:] {
		if !strings.Contains(e.Msg+"; "+e.Details, text) {
			ts.Fatalf("error %q %q does not name %q", e.Msg, e.Details, text)
		}
	}
}

// field NAME VALUE wants a field of c1's record.
func field(ts *testscript.TestScript, neg bool, args []string) {
	b, err := os.ReadFile(filepath.Join(ts.Getenv("DATA"), "attachments/c1-eth0.json"))
	ts.Check(err)
	var m map[string]any
	ts.Check(json.Unmarshal(b, &m))
	got, err := json.Marshal(m[args[0]])
	ts.Check(err)
	if string(got) != args[1] {
		ts.Fatalf("record field %s is %s, want %s", args[0], got, args[1])
	}
}

// agent SOCKET ANSWER starts an agent that writes requests to requests.txt and
// answers "HTTP/1.1 ANSWER", or with "hang" not at all.
func agent(ts *testscript.TestScript, neg bool, args []string) {
	ln, err := net.Listen("unix", args[0])
	ts.Check(err)
	done := make(chan struct{})
	log := ts.MkAbs("requests.txt")
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			b := make([]byte, 4096)
			n := 0
			for !strings.Contains(string(b[:n]), "}") { // the body is one object
				m, err := c.Read(b[n:])
				if err != nil {
					break
				}
				n += m
			}
			f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
			if err == nil {
				_, _ = f.Write(append(b[:n:n], '\n'))
				_ = f.Close()
			}
			if args[1] == "hang" {
				_, _ = c.Read(b) // until the plugin gives up
			} else {
				_, _ = fmt.Fprintf(c, "%s\r\nContent-Type: text/plain\r\n\r\nno room today\n", args[1])
			}
			_ = c.Close()
		}
	}()
	ts.Defer(func() {
		_ = ln.Close()
		<-done
	})
}

// deadsocket SOCKET leaves the socket of an agent that was killed.
func deadSocket(ts *testscript.TestScript, neg bool, args []string) {
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: args[0], Net: "unix"})
	ts.Check(err)
	ln.SetUnlinkOnClose(false)
	ts.Check(ln.Close())
}

// fulldisk DIR mounts a file system at DIR that is full.
func fullDisk(ts *testscript.TestScript, neg bool, args []string) {
	dir := args[0]
	ts.Check(os.MkdirAll(dir, 0o700))
	ts.Check(syscall.Mount("ks-full", dir, "tmpfs", 0, "size=16k,mode=0755"))
	ts.Defer(func() { ts.Check(syscall.Unmount(dir, syscall.MNT_DETACH)) })
	ts.Check(os.Mkdir(filepath.Join(dir, "attachments"), 0o700))
	err := os.WriteFile(filepath.Join(dir, "ballast"), make([]byte, 1<<20), 0o600)
	if !errors.Is(err, syscall.ENOSPC) {
		ts.Fatalf("fill %s: %v, want ENOSPC", dir, err)
	}
}

func TestPluginIsSmallAndStatic(t *testing.T) {
	testenv.Need(t, testenv.Program("go"))
	const most = 8 << 20
	bin := filepath.Join(t.TempDir(), "smcr-cni")
	command(t, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", bin, ".")
	st, err := os.Stat(bin)
	if err != nil {
		t.Fatal(err)
	}
	if st.Size() >= most {
		t.Errorf("the plugin has %d bytes, at most %d are wanted", st.Size(), most)
	}
	wantStatic(t, bin)
	for _, dep := range strings.Fields(command(t, "go", "list", "-deps", ".")) {
		for _, heavy := range []string{"k8s.io/", "sigs.k8s.io/", "net/http", "crypto/tls", "github.com/prometheus/"} {
			if strings.HasPrefix(dep, heavy) {
				t.Errorf("the plugin depends on %s", dep)
			}
		}
	}
}

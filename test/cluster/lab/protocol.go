// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"
)

// The client of a cluster sends its supervisor one request per connection to a
// Unix socket, and gets one response.

type operation string

const (
	opReady    operation = "ready"    // waits until the cluster is up
	opDown     operation = "down"     // ends the cluster
	opPowerOff operation = "powerOff" // of Node
	opPowerOn  operation = "powerOn"  // of Node; waits until it is ready
	opService  operation = "service"  // does Action to Service of Node
	opPort     operation = "port"     // sets the port of NIC of Node
	opLoad     operation = "load"     // loads the image in Path into all nodes but external ones
	opAwait    operation = "await"    // waits until Node has been ready since Since
)

type action string

const (
	actStop    action = "stop"
	actKill    action = "kill"
	actStart   action = "start"
	actRestart action = "restart"
	actPause   action = "pause"
	actResume  action = "resume"
)

type request struct {
	Op      operation `json:"op"`
	Node    string    `json:"node,omitempty"` // empty: the control plane
	Service string    `json:"service,omitempty"`
	Action  action    `json:"action,omitempty"`
	NIC     string    `json:"nic,omitempty"`
	Up      bool      `json:"up,omitempty"`
	Path    string    `json:"path,omitempty"`
	Since   time.Time `json:"since,omitzero"`
}

type response struct {
	Error string `json:"error,omitempty"`
	Info  info   `json:"info,omitzero"`
}

// An info is what a client must know.
type info struct {
	Supervisor   int        `json:"supervisor"`
	ControlPlane int        `json:"controlPlane"`
	Tools        string     `json:"tools"`
	Logs         string     `json:"logs"`
	IPv6         bool       `json:"ipv6"`
	Images       []string   `json:"images"`
	Nodes        []nodeInfo `json:"nodes"`
}

type nodeInfo struct {
	Name string `json:"name"`
	PID  int    `json:"pid,omitempty"` // of its process 1; 0 while it is off
	Root string `json:"root"`
	// External says that the machine is somebody else's.
	External bool `json:"external,omitempty"`
}

func socketOf(dir string) string { return filepath.Join(dir, "control") }

// ask sends a request and waits for the response, until ctx ends.
func ask(ctx context.Context, dir string, r request) (info, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socketOf(dir))
	if err != nil {
		return info{}, fmt.Errorf("ask the cluster in %s: %w", dir, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer func() {
		stop()
		_ = conn.Close()
	}()
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return info{}, fmt.Errorf("ask the cluster in %s: %w", dir, errors.Join(err, ctx.Err()))
	}
	var answer response
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return info{}, fmt.Errorf("wait for the cluster in %s: %w", dir, errors.Join(err, ctx.Err()))
	}
	if answer.Error != "" {
		return info{}, errors.New(answer.Error)
	}
	return answer.Info, nil
}

// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// order tells QEMU to do something by its monitor protocol, QMP: one connection
// per order, so that several programs may give orders.
func (g *Guest) order(ctx context.Context, command string, arguments any) error {
	ctx, cancel := context.WithTimeout(ctx, monitorTimeout)
	defer cancel()
	if err := g.tryOrder(ctx, command, arguments); err != nil {
		return fmt.Errorf("%s: tell QEMU to %s: %w", g.Name(), command, errors.Join(err, g.failure()))
	}
	return nil
}

func (g *Guest) tryOrder(ctx context.Context, command string, arguments any) error {
	return g.tryOrders(ctx, request{Execute: command, Arguments: arguments})
}

// A request is an order, and maybe a file that goes with it.
type request struct {
	Execute   string `json:"execute"`
	Arguments any    `json:"arguments,omitempty"`
	file      *os.File
}

// tryOrders gives orders until one fails. A file that one of them names is known to
// those after it.
func (g *Guest) tryOrders(ctx context.Context, orders ...request) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", g.monitorSocket())
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return err
	}
	in := json.NewDecoder(conn)
	var greeting struct {
		QMP json.RawMessage `json:"QMP"`
	}
	if err := in.Decode(&greeting); err != nil {
		return fmt.Errorf("wait for its greeting: %w", err)
	}
	for _, r := range slices.Concat([]request{{Execute: "qmp_capabilities"}}, orders) {
		if err := r.send(conn.(*net.UnixConn)); err != nil {
			return err
		}
		if err := response(in); err != nil {
			return err
		}
	}
	return nil
}

func (r request) send(conn *net.UnixConn) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if r.file == nil {
		_, err = conn.Write(text)
		return err
	}
	_, _, err = conn.WriteMsgUnix(text, unix.UnixRights(int(r.file.Fd())), nil)
	return err
}

// response reads until the answer: events may come before it.
func response(in *json.Decoder) error {
	for {
		var answer struct {
			Return json.RawMessage `json:"return"`
			Error  *struct {
				Desc string `json:"desc"`
			} `json:"error"`
		}
		if err := in.Decode(&answer); err != nil {
			return fmt.Errorf("wait for its answer: %w", err)
		}
		switch {
		case answer.Error != nil:
			return errors.New(answer.Error.Desc)
		case answer.Return != nil:
			return nil
		}
	}
}

// SetLink cuts the link of a NIC, or restores it: the guest sees its carrier go
// and come. The others see nothing.
func (g *Guest) SetLink(nic int, up bool) error {
	return g.order(context.Background(), "set_link", map[string]any{"name": nicID(nic), "up": up})
}

// Reset is what a reset button does. It returns when the guest takes commands
// again; those that ran end with an error. All links are up then.
func (g *Guest) Reset(ctx context.Context) error {
	began := time.Now()
	reset := fmt.Errorf("%s: %w", g.Name(), errReset)
	g.disconnect(reset)
	if err := g.order(ctx, "system_reset", nil); err != nil {
		return err
	}
	g.console.forget()
	g.disconnect(reset) // also if it had crashed meanwhile
	for nic := range g.lab.cfg.NICs {
		if err := g.SetLink(nic, true); err != nil {
			return err
		}
	}
	for pf := range g.lab.cfg.PFs {
		if err := g.SetPFLink(pf, true); err != nil {
			return err
		}
	}
	if _, err := g.connected(ctx); err != nil {
		return fmt.Errorf("reset: %w", err)
	}
	_, _ = fmt.Fprintf(g.lab.cfg.Log, "vm: %s is back after %.1fs\n", g.Name(), time.Since(began).Seconds())
	return nil
}

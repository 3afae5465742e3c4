// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// SyncPath is the path of the agent's API to which Notify sends its POST. The agent answers with a
// status of 200 to 299 once it has read the records and set the pods up; to STATUS as soon as it
// could do so.
const SyncPath = "/v1/attachments/sync"

// Event tells the agent why it is notified. The agent may ignore it: the records say
// all that matters.
type Event struct {
	Verb        string `json:"verb"` // "ADD", "DEL", "GC", or "STATUS" if nothing happened
	ContainerID string `json:"containerID,omitempty"`
	IfName      string `json:"ifName,omitempty"`
}

// Notify sends event to the agent at a Unix socket and waits for its answer, until ctx
// ends. It writes the few lines of HTTP/1.1 itself: the standard client, with TLS and
// HTTP/2, would triple the size of the plugin.
func Notify(ctx context.Context, socket string, event Event) error {
	if err := notify(ctx, socket, event); err != nil {
		switch {
		case ctx.Err() != nil:
			err = ctx.Err()
		case errors.Is(err, os.ErrDeadlineExceeded): // the dialer noticed the end of ctx before ctx did
			err = context.DeadlineExceeded
		}
		return fmt.Errorf("notify agent at %s: %w", socket, err)
	}
	return nil
}

func notify(ctx context.Context, socket string, event Event) error {
	body, err := json.Marshal(event)
	if err != nil {
		return err
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // the answer has been read, or does not matter
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err = fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: agent\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s",
		SyncPath, len(body), body)
	if err != nil {
		return err
	}
	return readAnswer(io.LimitReader(c, maxAnswerBytes))
}

// readAnswer reads an HTTP/1.1 response. Unless its status is a success, it returns an
// error with the first line of the body.
func readAnswer(r io.Reader) error {
	b := bufio.NewReader(r)
	line, err := b.ReadString('\n')
	if err != nil {
		return fmt.Errorf("read answer: %w", noEOF(err))
	}
	version, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	code, reason, _ := strings.Cut(rest, " ")
	status, err := strconv.Atoi(code)
	if err != nil || len(code) != 3 || !strings.HasPrefix(version, "HTTP/1.") {
		return fmt.Errorf("answer %q is not HTTP", clip(line))
	}
	if status >= 200 && status <= 299 {
		return nil
	}
	for { // headers
		line, err := b.ReadString('\n')
		if err != nil || strings.TrimSpace(line) == "" {
			break
		}
	}
	text, _ := b.ReadString('\n') // empty when there is none
	return fmt.Errorf("agent answers %d %s: %s", status, clip(reason), clip(text))
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// clip shortens another program's text for a message.
func clip(s string) string {
	const most = 200
	s = strings.TrimSpace(s)
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strings.ToValidUTF8(s, "?")
}

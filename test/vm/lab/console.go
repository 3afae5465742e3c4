// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"
)

// A CrashError says that the kernel of a guest has given up.
type CrashError struct {
	Guest   string
	Line    string // the first that says so
	Excerpt string // the last of the console
}

func (e *CrashError) Error() string {
	return fmt.Sprintf("%s: the kernel crashed: %s\n%s", e.Guest, e.Line, e.Excerpt)
}

// crash is what a kernel says that does not go on: an oops is made a panic on the
// command line. complaint is what it says when something is wrong with it.
var (
	crash     = regexp.MustCompile(`Kernel panic - not syncing`)
	complaint = regexp.MustCompile(`BUG:|kernel BUG at|Oops|general protection fault|WARNING: |blocked for more than \d+ seconds|rcu: INFO: .*stall|soft lockup|UBSAN|refcount_t:|unregister_netdevice: waiting|Out of memory: Killed`)
)

// A console looks for trouble in what a guest's kernel says.
type console struct {
	guest *Guest
	file  string

	mu         sync.Mutex
	offset     int64
	rest       string // of a line that is not complete
	complaints []string
}

// watch looks at the consoles until the lab is closed.
func (l *Lab) watch() {
	ctx, cancel := context.WithCancel(context.Background())
	l.watching = cancel
	l.watchers.Go(func() {
		ticker := time.NewTicker(consoleInterval)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				for _, g := range l.guests {
					g.console.look()
				}
			}
		}
	})
}

// look reads what is new.
func (c *console) look() {
	if line := c.read(); line != "" {
		c.guest.fail(&CrashError{Guest: c.guest.Name(), Line: line, Excerpt: c.excerpt()})
	}
}

// read returns the line that says that the kernel crashed, if there is one.
func (c *console) read() (crashed string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f, err := os.Open(c.file)
	if err != nil {
		return "" // not started yet
	}
	defer func() { _ = f.Close() }()
	if _, err := f.Seek(c.offset, io.SeekStart); err != nil {
		return ""
	}
	text, err := io.ReadAll(f)
	if err != nil {
		return ""
	}
	c.offset += int64(len(text))
	lines := strings.Split(c.rest+strings.ReplaceAll(string(text), "\r", ""), "\n")
	c.rest = lines[len(lines)-1]
	for _, line := range lines[:len(lines)-1] {
		if crash.MatchString(line) && crashed == "" {
			crashed = line
		}
		if complaint.MatchString(line) {
			c.complaints = append(c.complaints, c.guest.Name()+": "+line)
		}
	}
	return crashed
}

// forget looks over what the console has so far, without asking whether the
// guest has crashed: it begins anew.
func (c *console) forget() {
	c.read()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rest = ""
}

// excerpt is the end of the console.
func (c *console) excerpt() string {
	lines := strings.Split(strings.TrimRight(c.guest.Console(), "\n"), "\n")
	return fmt.Sprintf("the end of the console of %s:\n  %s", c.guest.Name(), strings.Join(lines[max(0, len(lines)-excerptLines):], "\n  "))
}

// Complaints are the lines on the consoles in which a kernel says that something
// is wrong with it: a bug, a warning with its stack, a task that hangs, a stall.
func (l *Lab) Complaints() []string {
	var all []string
	for _, g := range l.guests {
		g.console.look()
		g.console.mu.Lock()
		all = append(all, g.console.complaints...)
		g.console.mu.Unlock()
	}
	return all
}

// ForgiveComplaints forgets the complaints so far that match: those that a
// test provokes.
func (l *Lab) ForgiveComplaints(pattern *regexp.Regexp) {
	for _, g := range l.guests {
		g.console.look()
		g.console.mu.Lock()
		var kept []string
		for _, line := range g.console.complaints {
			if !pattern.MatchString(line) {
				kept = append(kept, line)
			}
		}
		g.console.complaints = kept
		g.console.mu.Unlock()
	}
}

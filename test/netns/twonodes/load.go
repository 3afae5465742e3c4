// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

// LoadResult is what an application in the background did.
type LoadResult struct {
	Application string `json:"application"`
	Runs        int    `json:"runs"`
	Failed      int    `json:"failed"`
	// Bytes were received with the right checksum, Lost were not.
	Bytes  int64    `json:"bytes"`
	Lost   int64    `json:"bytesLost"`
	Errors []string `json:"errors,omitempty"`
}

func (r *LoadResult) String() string {
	text := fmt.Sprintf("%d runs, %d failed", r.Runs, r.Failed)
	if r.Bytes+r.Lost > 0 {
		text = fmt.Sprintf("%d of %s, %d failed, bytes lost: %d", r.Runs, byteCount(uint64(r.Bytes+r.Lost)/uint64(r.Runs)), r.Failed, r.Lost)
	}
	if len(r.Errors) > 0 {
		text += "; the first error: " + strings.ReplaceAll(r.Errors[0], "\n", "; ")
	}
	return text
}

// load is the applications in the background. They run again and again; each
// run that was begun is finished.
type load struct {
	wg       sync.WaitGroup
	stop     chan struct{}
	download LoadResult // read it after wait
	redis    LoadResult
}

// startLoad starts them.
func (f *Failover) startLoad(ctx context.Context) *load {
	l := &load{
		stop:     make(chan struct{}),
		download: LoadResult{Application: "nginx + curl"},
		redis:    LoadResult{Application: "redis-benchmark"},
	}
	host, file := f.server.Addr4.String(), f.file
	l.loop(ctx, &l.download, func(ctx context.Context) error {
		o, err := f.curl(ctx, host, "large", file, "--limit-rate", strconv.Itoa(downloadRate))
		if err == nil && o.wrong != "" {
			err = errors.New(o.wrong)
		}
		if err != nil {
			l.download.Lost += file.bytes - min(int64(o.bytes), file.bytes-1)
			return err
		}
		l.download.Bytes += file.bytes
		return nil
	})
	l.loop(ctx, &l.redis, func(ctx context.Context) error {
		_, err := f.client.Run(ctx, lab.Command{Args: []string{
			"redis-benchmark", "-h", host, "-p", strconv.Itoa(portRedis), "-c", "1", "-n", "5000", "-d", "64", "-t", "set,get", "--csv",
		}})
		return err
	})
	return l
}

// loop runs f until the load ends. Who fails tries again a little later.
func (l *load) loop(ctx context.Context, r *LoadResult, f func(context.Context) error) {
	l.wg.Go(func() {
		for {
			rctx, cancel := context.WithTimeoutCause(ctx, runTimeout, fmt.Errorf("no end after %v", runTimeout))
			err := f(rctx)
			cancel()
			if ctx.Err() != nil {
				return // interrupted: nothing is known of this run
			}
			r.Runs++
			wait := time.Duration(0)
			if err != nil {
				r.Failed++
				r.Errors = append(r.Errors, err.Error())
				wait = tryEvery
			}
			if r.Failed >= maxFailures {
				return
			}
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return
			case <-l.stop:
				return
			}
			select {
			case <-l.stop: // without a wait both were ready
				return
			default:
			}
		}
	})
}

// finish lets the runs that were begun end, and waits for that.
func (l *load) finish() {
	close(l.stop)
	l.wg.Wait()
}

// startServers starts what the applications talk to.
func (f *Failover) startServers(ctx context.Context) (err error) {
	size := int64(1 << 30)
	if f.cfg.Quick {
		size = 256 << 20
	}
	if f.file, err = makeBody(filepath.Join(f.server.Dir, "large"), size); err != nil {
		return err
	}
	if err := startNginx(ctx, f.server); err != nil {
		return err
	}
	return startServer(ctx, f.server, portRedis, "redis-server", "--port", strconv.Itoa(portRedis), "--save", "",
		"--appendonly", "no", "--protected-mode", "no", "--dir", f.server.Dir)
}

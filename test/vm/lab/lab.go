// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/smcr-io/kube-smcr/test/vm/lab/image"
	"github.com/smcr-io/kube-smcr/test/vm/lab/wire"
)

// A Config says how a lab is to be. The zero value is two guests of two NICs.
type Config struct {
	// Name tells labs apart: lower case letters, digits and dashes, at most 24. The
	// default is unique to this process.
	Name string
	// Guests is how many there are; 0 is 2.
	Guests int
	// NICs is how many each has; 0 is 2.
	NICs int
	// PFs is how many igb NICs each has besides, whose virtual functions
	// [Guest.MakeVFs] makes. They take a newer QEMU, which is downloaded.
	PFs int `json:",omitempty"`
	// NUMA gives each guest two NUMA nodes, and PF i to node i modulo 2.
	NUMA bool `json:",omitempty"`
	// Kernels are the kernels of the guests; the last one is the kernel of all further
	// guests. None is [image.SMC] for all.
	Kernels []image.Kernel `json:",omitempty"`
	// MTU of the NICs; 0 is 9000.
	MTU int
	// MemoryMiB is what each guest has; 0 is 1024.
	MemoryMiB int
	// Processors is how many each has; 0 is 1.
	Processors int `json:",omitempty"`
	// Modules are kernel modules to load in the boot; what commands ask for, as
	// "rdma link add" does for rxe, is loaded then.
	Modules []string
	// Disks are images of further disks that every guest has: vdb and so on. A guest may
	// write to them, and the images stay as they are: what was written is there until the
	// guest's QEMU ends, and after a [Guest.Reset], too.
	Disks []string `json:",omitempty"`
	// Containers leaves to the guests' kernels what containers ask of them and nothing
	// else does, accounts of memory.
	Containers bool `json:",omitempty"`
	// CoarseTimers makes the guests' timers as coarse as 4 ms, which costs a tenth less of
	// this machine's processor time, and more where many programs of Go run. Not for who measures times.
	CoarseTimers bool `json:",omitempty"`
	// Detach lets the guests live when this process ends.
	Detach bool `json:"-"`
	// Log is told what happens; nil for nobody.
	Log io.Writer `json:"-"`
}

var namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)

func (c *Config) setDefaults() error {
	if c.Name == "" {
		c.Name = fmt.Sprintf("test-%d", os.Getpid())
	}
	for p, value := range map[*int]int{&c.Guests: 2, &c.NICs: 2, &c.MTU: defaultMTU, &c.MemoryMiB: defaultMemoryMiB, &c.Processors: 1} {
		if *p == 0 {
			*p = value
		}
	}
	if len(c.Kernels) == 0 {
		c.Kernels = []image.Kernel{image.SMC}
	}
	if c.Log == nil {
		c.Log = io.Discard
	}
	switch {
	case len(c.Name) > maxNameLen || !namePattern.MatchString(c.Name):
		return fmt.Errorf("name %q: want up to %d lower case letters, digits and dashes", c.Name, maxNameLen)
	case c.Guests < 1 || c.Guests > wire.MaxGuests:
		return fmt.Errorf("%d guests: want 1 to %d", c.Guests, wire.MaxGuests)
	case c.NICs < 1 || c.NICs > wire.MaxNICs:
		return fmt.Errorf("%d NICs: want 1 to %d", c.NICs, wire.MaxNICs)
	case c.PFs < 0 || c.PFs > wire.MaxPFs:
		return fmt.Errorf("%d PFs: want up to %d", c.PFs, wire.MaxPFs)
	case len(c.Disks) > maxDisks:
		return fmt.Errorf("%d disks: want up to %d", len(c.Disks), maxDisks)
	case c.Processors < 1 || c.Processors > maxProcessors:
		return fmt.Errorf("%d processors: want 1 to %d", c.Processors, maxProcessors)
	case c.MTU < 1280 || c.MTU > 65521:
		return fmt.Errorf("an MTU of %d: want 1280, which IPv6 needs, to 65521", c.MTU)
	}
	for _, m := range c.Modules {
		if strings.ContainsAny(m, " ,\"") {
			return fmt.Errorf("module %q: one name, please", m)
		}
	}
	return nil
}

// A Lab is a number of running guests. It may be used by several goroutines.
type Lab struct {
	cfg    Config
	dir    string
	guests []*Guest
	keeper *keeper // nil in a lab that another process started

	hungAfter atomic.Int64 // a time.Duration, which a test changes

	building sync.Mutex // one build at a time: they want all cores anyway
	watching context.CancelFunc
	watchers sync.WaitGroup
}

// Up starts guests and returns when all of them take commands. It builds the image
// if that is not in the cache, and removes what dead labs left.
func Up(ctx context.Context, cfg Config) (*Lab, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, fmt.Errorf("start guests: %w", err)
	}
	images := map[image.Kernel]image.Files{}
	for _, kernel := range cfg.Kernels {
		img, err := image.Get(ctx, kernel, cfg.Log)
		if err != nil {
			return nil, fmt.Errorf("start guests: %w", err)
		}
		images[kernel] = img
	}
	var err error
	qemu := image.Installed()
	if cfg.PFs > 0 {
		if qemu, err = image.GetIGB(ctx, cfg.Log); err != nil {
			return nil, fmt.Errorf("start guests: %w", err)
		}
	}
	if err := Sweep(); err != nil { // of others: it does not hinder this one
		_, _ = fmt.Fprintf(cfg.Log, "vm: remove what former guests left: %v\n", err)
	}
	dir, lock, err := claim(cfg.Name)
	if err != nil {
		return nil, fmt.Errorf("start guests %s: %w", cfg.Name, err)
	}
	l := newLab(cfg, dir)
	err = l.start(ctx, images, qemu, lock)
	_ = lock.Close() // QEMU has it
	if err == nil {
		err = l.connectAll(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("start guests %s: %w", cfg.Name, errors.Join(err, l.Close()))
	}
	return l, nil
}

func newLab(cfg Config, dir string) *Lab {
	l := &Lab{cfg: cfg, dir: dir}
	l.hungAfter.Store(int64(hungAfter))
	for i := range cfg.Guests {
		l.guests = append(l.guests, newGuest(l, i))
	}
	return l
}

func (l *Lab) start(ctx context.Context, images map[image.Kernel]image.Files, qemu image.Emulator, lock *os.File) error {
	if err := os.MkdirAll(filepath.Join(l.Share(), "bin"), 0o755); err != nil {
		return err
	}
	if err := l.writeInitrds(ctx, images); err != nil {
		return err
	}
	if err := l.saveConfig(); err != nil {
		return err
	}
	l.keeper = newKeeper(l.cfg.Detach)
	for _, g := range l.guests {
		if err := l.keeper.start(g, qemu, g.arguments(images[g.kernel()], l.initrd(g.kernel())), lock); err != nil {
			return err
		}
	}
	l.watch()
	return nil
}

func (l *Lab) connectAll(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, guest := range l.guests {
		g.Go(func() error {
			_, err := guest.connected(ctx)
			return err
		})
	}
	return g.Wait()
}

// Open finds a lab that is up.
func Open(name string) (*Lab, error) {
	cfg, dir, err := loadConfig(name)
	if err != nil {
		return nil, err
	}
	l := newLab(cfg, dir)
	for _, g := range l.guests {
		g.console.forget() // whoever started them was told
	}
	l.watch()
	return l, nil
}

// Name is the name of the lab.
func (l *Lab) Name() string { return l.cfg.Name }

// Guest is a guest, from 0.
func (l *Lab) Guest(i int) *Guest { return l.guests[i] }

// Guests is how many there are.
func (l *Lab) Guests() int { return len(l.guests) }

// Share is the directory that the guests see as /host.
func (l *Lab) Share() string { return filepath.Join(l.dir, "share") }

// Close ends the guests without asking them, and removes everything. A lab that
// [Open] found lives on.
func (l *Lab) Close() error {
	for _, g := range l.guests {
		g.fail(fmt.Errorf("%s: %w", g.Name(), errClosed))
	}
	if l.watching != nil {
		l.watching()
		l.watchers.Wait()
	}
	if l.keeper == nil {
		return nil
	}
	err := l.keeper.stop()
	return errors.Join(err, removeLab(l.dir))
}

// Forget closes the connections to guests that are detached, and lets them run.
func (l *Lab) Forget() {
	l.keeper = nil
	_ = l.Close()
}

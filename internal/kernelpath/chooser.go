// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// word is enum choice of bpf/rules.bpf.h.
type word uint32

const (
	notSMC word = 1
	smc    word = 2
)

// rule is struct rule there.
type rule struct {
	Word    word
	_       uint32
	Sockets uint64
}

// pinnedLink is the name of the program's pin, and nextLink that of the program that is to
// take its place.
const (
	pinnedLink = "choose_protocol"
	nextLink   = "choose_protocol_next" // names there have no dots
)

// Dir is the directory of the pins, where nobody has a reason for another one.
const Dir = "/sys/fs/bpf/kube-smcr"

// ErrFull means that there is no room for another rule of its kind.
var ErrFull = errors.New("no room for another rule")

// Config says where the program is pinned, and whom it leaves alone.
type Config struct {
	// Dir is the directory of the pins, below a mount of the BPF file system. It is made if
	// it is not there. "" pins nothing.
	Dir string
	// Exclude are the IDs of cgroups that are never chosen. They take the place of those that an
	// earlier Open pinned.
	Exclude []uint64
	// Veths, if given, serve pods that have a veth only.
	Veths *Veths
}

// A Chooser is the program at work.
type Chooser struct {
	namespaces, cgroups *ebpf.Map
	dir                 string // of the pins, or ""
	veths               *Veths // or nil

	mu   sync.Mutex // guards link
	link link.Link

	// module is a socket of SMC, which nobody connects: while it is open the module stays in the kernel, without which
	// the sockets of those that are chosen are refused. -1: the kernel has none.
	module int
}

// Open loads the program and attaches it, or finds it where it is pinned. A [MissingError]
// says why that is not possible here.
func Open(cfg Config) (*Chooser, error) {
	c, err := open(cfg)
	if err != nil {
		return nil, fmt.Errorf("open the program that chooses SMC: %w", err)
	}
	if err := c.exclude(cfg.Exclude); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// exclude makes the rules of Config.Exclude, in place of those of the Open before.
func (c *Chooser) exclude(ids []uint64) error {
	rules, err := c.Rules()
	if err != nil {
		return err
	}
	for _, r := range rules {
		if r.Exclude && !slices.Contains(ids, r.Cgroup) {
			if err := c.Forget(r.Choice); err != nil {
				return err
			}
		}
	}
	for _, id := range ids {
		if err := put(c.cgroups, id, notSMC); err != nil {
			return fmt.Errorf("exclude cgroup %d: %w", id, err)
		}
	}
	return nil
}

func open(cfg Config) (*Chooser, error) {
	spec, err := loadProgram()
	if err != nil {
		return nil, err
	}
	opt := ebpf.CollectionOptions{}
	if cfg.Dir != "" {
		if err := makePins(cfg.Dir); err != nil {
			return nil, err
		}
		for _, m := range spec.Maps {
			m.Pinning = ebpf.PinByName
		}
		opt.Maps.PinPath = cfg.Dir
	}
	var o programObjects
	if err := spec.LoadAndAssign(&o, &opt); err != nil {
		if missing := findHook(); missing != nil {
			return nil, missing
		}
		return nil, loadError(err)
	}
	c := &Chooser{namespaces: o.Namespaces, cgroups: o.Cgroups, dir: cfg.Dir, veths: cfg.Veths, module: holdModule()}
	if c.link, err = attach(o.ChooseProtocol, cfg.Dir); err != nil {
		c.releaseModule()
		return nil, errors.Join(err, o.Close())
	}
	return c, o.ChooseProtocol.Close() // the link keeps it
}

// Lead brings the program before those that came to the hook after it, and tells whether there were any: the last
// one is asked first, and decides if it answers. Ours answers for those who are chosen only.
func (c *Chooser) Lead() (was bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if was, err = isOvertaken(c.link); err != nil || !was {
		return was, err
	}
	p, err := c.loadAgain()
	if err != nil {
		return true, err
	}
	defer func() { err = errors.Join(err, p.Close()) }() // the link keeps it
	l, err := attach(p, c.dir)
	if err != nil {
		return true, err
	}
	old := c.link
	c.link = l
	return true, old.Close()
}

// loadAgain loads the program once more, with the rules that there are: the kernel attaches none twice.
func (c *Chooser) loadAgain() (*ebpf.Program, error) {
	spec, err := loadProgram()
	if err != nil {
		return nil, err
	}
	var o programPrograms
	err = spec.LoadAndAssign(&o, &ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{"namespaces": c.namespaces, "cgroups": c.cgroups}})
	if err != nil {
		return nil, loadError(err)
	}
	return o.ChooseProtocol, nil
}

// isOvertaken tells whether a program came to the hook of a link after it.
func isOvertaken(l link.Link) (bool, error) {
	info, err := l.Info()
	if err != nil {
		return false, err
	}
	ours := info.Tracing()
	if ours == nil {
		return false, nil
	}
	it := link.Iterator{ID: info.ID} // IDs grow
	defer it.Close()
	for it.Next() {
		info, err := it.Link.Info()
		if err != nil {
			return false, err
		}
		if other := info.Tracing(); other != nil && *other == *ours {
			return true, nil
		}
	}
	return false, it.Err()
}

// holdModule opens a socket of SMC, if that is possible: [Probe] says why not. It is in a namespace of its own, as of one
// without ports in the node's network nobody can tell that it is no pod's.
func holdModule() int {
	ns, err := linux.ScratchNetNS()
	if err != nil {
		return -1
	}
	defer func() { _ = ns.Close() }() // the socket keeps it
	fd := -1
	err = ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, protocolSMC)
		return err
	})
	if err != nil {
		return -1
	}
	return fd
}

// makePins makes the directory of the pins.
func makePins(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return &MissingError{NoPins, err}
	}
	return checkPins(dir)
}

// checkPins tells whether a directory is in a BPF file system.
func checkPins(dir string) error {
	var st unix.Statfs_t
	switch err := unix.Statfs(dir, &st); {
	case errors.Is(err, unix.EACCES):
		return &MissingError{NoRights, err}
	case err != nil:
		return &MissingError{NoPins, fmt.Errorf("look at %s: %w", dir, err)}
	}
	if st.Type != unix.BPF_FS_MAGIC {
		return &MissingError{NoPins, fmt.Errorf("%s is not in a BPF file system", dir)}
	}
	return nil
}

// hook is the function of the kernel whose answer the program gives.
const hook = "update_socket_protocol"

// findHook looks for the hook in what the kernel says of itself: the error of the load does not
// tell what is not there.
func findHook() error {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return &MissingError{NoBTF, err}
	}
	var f *btf.Func
	if err := spec.TypeByName(hook, &f); err != nil {
		return &MissingError{NoHook, fmt.Errorf("look for %s: %w", hook, err)}
	}
	return nil
}

// loadError says what a refusal of a map or the program means, where the hook is.
func loadError(err error) error {
	var verifier *ebpf.VerifierError
	switch {
	case errors.Is(err, unix.EPERM):
		return &MissingError{NoRights, err}
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, unix.ENOSYS):
		return &MissingError{NoBPF, err}
	case errors.As(err, &verifier) && slices.ContainsFunc(verifier.Log, isNotModifiable):
		return &MissingError{NoHook, err}
	case errors.As(err, &verifier):
		return &MissingError{Refused, err}
	}
	return err
}

// isNotModifiable says whether a line of the verifier's is that programs may not change what a
// function answers, as without CONFIG_MPTCP.
func isNotModifiable(line string) bool { return strings.Contains(line, "is not modifiable") }

// attach puts the program p to work, pinned in dir unless that is "". If the same one is pinned there
// already, and none came to the hook after it, that goes on.
func attach(p *ebpf.Program, dir string) (link.Link, error) {
	name := filepath.Join(dir, pinnedLink)
	if dir != "" {
		old, err := link.LoadPinnedLink(name, nil)
		switch {
		case err == nil && sameProgram(old, p) && !mustYield(old):
			return old, nil
		case err == nil: // works until the new one is in its place
			defer func() { _ = old.Close() }()
		case !errors.Is(err, fs.ErrNotExist):
			return nil, fmt.Errorf("open the pinned program: %w", err)
		}
	}
	l, err := link.AttachTracing(link.TracingOptions{Program: p, AttachType: ebpf.AttachModifyReturn})
	if err != nil {
		return nil, attachError(err)
	}
	if dir == "" {
		return l, nil
	}
	// Two programs with the same rules do no harm, none would.
	next := filepath.Join(dir, nextLink)
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, errors.Join(err, l.Close())
	}
	err = l.Pin(next)
	if err == nil {
		err = os.Rename(next, name)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pin the program: %w", err), l.Close())
	}
	return l, nil
}

// mustYield tells whether a link's program is not asked first. Where that cannot be told, it is taken for the first.
func mustYield(l link.Link) bool {
	overtaken, err := isOvertaken(l)
	return err == nil && overtaken
}

// attachError says what a refusal of the hook means.
func attachError(err error) error {
	// errNotSupp is an answer of the kernel's that no header has: here, no trampolines for this processor.
	const errNotSupp = unix.Errno(524)
	switch {
	case errors.Is(err, unix.EPERM):
		return &MissingError{NoRights, err}
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, errNotSupp):
		return &MissingError{NoBPF, err}
	}
	return fmt.Errorf("attach the program: %w", err)
}

// sameProgram says whether the program of a link has the instructions of p, and its maps.
func sameProgram(l link.Link, p *ebpf.Program) bool {
	info, err := l.Info()
	if err != nil {
		return false
	}
	pinned, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return false
	}
	defer func() { _ = pinned.Close() }()
	a, err := pinned.Info()
	if err != nil {
		return false
	}
	b, err := p.Info()
	if err != nil {
		return false
	}
	mapsA, okA := a.MapIDs()
	mapsB, okB := b.MapIDs()
	return a.Tag == b.Tag && okA && okB && slices.Equal(mapsA, mapsB)
}

// Close ends the program unless it is pinned.
func (c *Chooser) Close() error {
	c.releaseModule()
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(c.link.Close(), c.namespaces.Close(), c.cgroups.Close())
}

func (c *Chooser) releaseModule() {
	if c.module >= 0 {
		unix.Close(c.module)
	}
}

// Pinned tells whether the program has its pin in a directory, since the machine started: with the kernel that runs it is at work.
func Pinned(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, pinnedLink))
	return err == nil
}

// Unpin takes the pins of a directory away, and the directory: the program ends when nobody
// has it open. It is no error if there are none.
func Unpin(dir string) error {
	spec, err := loadProgram()
	if err != nil {
		return err
	}
	names := []string{pinnedLink, nextLink} // before its rules
	for name := range spec.Maps {
		names = append(names, name)
	}
	for _, name := range names {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("unpin the program that chooses SMC: %w", err)
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return fmt.Errorf("unpin the program that chooses SMC: %w", err)
	}
	return nil
}

// String names the choice for messages.
func (x Choice) String() string {
	if x.Cgroup != 0 {
		return fmt.Sprintf("cgroup %d", x.Cgroup)
	}
	return fmt.Sprintf("network namespace with cookie %d", x.NetNS)
}

// rules are the map that has a choice, and its key there.
func (c *Chooser) rules(x Choice) (*ebpf.Map, uint64) {
	if x.Cgroup != 0 {
		return c.cgroups, x.Cgroup
	}
	return c.namespaces, x.NetNS
}

// Choose makes new TCP sockets of a network namespace SMC, or of a cgroup and those below it. It does not
// change a rule of Config.Exclude.
func (c *Chooser) Choose(x Choice) error {
	m, key := c.rules(x)
	if err := put(m, key, smc); err != nil {
		return fmt.Errorf("choose %v: %w", x, err)
	}
	return nil
}

// Forget takes back Choose. It is no error if there is no such rule.
func (c *Chooser) Forget(x Choice) error {
	m, key := c.rules(x)
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("forget %v: %w", x, err)
	}
	return nil
}

// put adds a rule. One that is there stays, with its count.
func put(m *ebpf.Map, key uint64, what word) error {
	err := m.Update(key, rule{Word: what}, ebpf.UpdateNoExist)
	switch {
	case errors.Is(err, ebpf.ErrKeyExist):
		return nil
	case errors.Is(err, unix.E2BIG):
		return fmt.Errorf("%w: there are %d", ErrFull, maxRules)
	}
	return err
}

// isChosen tells whether there is a rule of a choice.
func (c *Chooser) isChosen(x Choice) (bool, error) {
	var r rule
	m, key := c.rules(x)
	err := m.Lookup(key, &r)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	return err == nil && r.Word == smc, err
}

// A Rule says who is chosen, and how many sockets that made SMC.
type Rule struct {
	Choice
	Exclude bool // the cgroup is not chosen
	Sockets uint64
}

// Rules returns all rules. Those that change meanwhile may be missing, or be there twice.
func (c *Chooser) Rules() ([]Rule, error) {
	var all []Rule
	var id uint64
	var r rule
	for it := c.namespaces.Iterate(); ; {
		if !it.Next(&id, &r) {
			if err := it.Err(); err != nil {
				return nil, fmt.Errorf("list network namespaces that are chosen: %w", err)
			}
			break
		}
		all = append(all, Rule{Choice: Choice{NetNS: id}, Exclude: r.Word == notSMC, Sockets: r.Sockets})
	}
	for it := c.cgroups.Iterate(); ; {
		if !it.Next(&id, &r) {
			if err := it.Err(); err != nil {
				return nil, fmt.Errorf("list cgroups that are chosen: %w", err)
			}
			return all, nil
		}
		all = append(all, Rule{Choice: Choice{Cgroup: id}, Exclude: r.Word == notSMC, Sockets: r.Sockets})
	}
}

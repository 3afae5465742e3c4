// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// place is where the two devices that may share an address find each other: files in
// a directory that only their user can enter. Their names have the network namespace
// and the address, so that devices of several namespaces can use one directory.
//
//	NAME.lock      bytes 0 and 1: locked by the device that has this generation
//	               byte 2: locked by the device that is being opened, or leaves
//	NAME.0, NAME.1 the sockets of the generations
//
// A lock belongs to the open file and ends with it, however its process ends: what a
// dead process, or the time before a reboot, left there is nobody's. The last device
// that leaves removes the files.
type place struct {
	dir  *os.File
	name string
	lock *os.File
}

// entryByte is the byte of the lock file that a device holds while it is opened, or leaves.
const entryByte = 2

// defaultDir is the directory of devices whose configuration names none.
func defaultDir() (string, error) {
	const name = "smcr-soft"
	if os.Geteuid() == 0 {
		return filepath.Join("/run", name), nil
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, name), nil
	}
	dir, err := os.UserCacheDir()
	return filepath.Join(dir, name), err
}

// openDir opens the directory, and makes it if need be. Nobody else may be able to put
// something there.
func openDir(dir string) (_ *os.File, err error) {
	if dir == "" {
		if dir, err = defaultDir(); err != nil {
			return nil, fmt.Errorf("find a directory for shared devices (or name one): %w", err)
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory for shared devices (or name another one): %w", err)
	}
	f, err := os.OpenFile(dir, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open the directory for shared devices, which may not be a symbolic link: %w", err)
	}
	st, err := f.Stat()
	if err == nil {
		if uid := st.Sys().(*syscall.Stat_t).Uid; int(uid) != os.Geteuid() {
			err = fmt.Errorf("directory %s for shared devices belongs to user %d and not to us: name another one, or remove it", dir, uid)
		} else if st.Mode().Perm()&0o077 != 0 {
			err = fmt.Errorf("directory %s for shared devices is open to other users (mode %o): chmod 700 it", dir, st.Mode().Perm())
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// enterPlace enters the place of an address, and waits while another device does: two
// devices that are opened at the same time could not tell which of them is the older one.
// scope is the interface of a link-local address, whose zone has several names.
func enterPlace(cfg Config, scope uint32) (_ *place, err error) {
	var ns unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &ns); err != nil {
		return nil, fmt.Errorf("find out the network namespace: %w", err)
	}
	addr := cfg.Addr.WithZone("").String()
	if cfg.scoped() {
		addr = fmt.Sprintf("%s%%%d", addr, scope)
	}
	p := &place{name: fmt.Sprintf("%d-%s-%d", ns.Ino, addr, cfg.Port)}
	end := time.Now().Add(joinTimeout)
	for {
		if p.dir, err = openDir(cfg.Dir); err != nil {
			return nil, err
		}
		if err = p.awaitEntry(end); err == nil {
			return p, nil
		}
		gone := errors.Is(err, os.ErrNotExist) // it was empty, and somebody removed it
		err = errors.Join(err, p.dir.Close())
		if !gone || time.Now().After(end) {
			return nil, err
		}
	}
}

func (p *place) awaitEntry(end time.Time) error {
	for ; ; time.Sleep(joinPoll) {
		var err error
		if p.lock, err = os.OpenFile(p.path(".lock"), os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW, 0o600); err != nil {
			return err
		}
		mine, err := p.take(entryByte)
		switch {
		case mine && p.stands():
			return nil
		case err == nil && !mine && time.Now().After(end):
			err = fmt.Errorf("another device is being opened for more than %v: is its process stopped?", joinTimeout)
		}
		// The next one may be another file: the last device that leaves removes it.
		if err = errors.Join(err, p.lock.Close()); err != nil {
			return err
		}
	}
}

// path names a file of the place by the open directory: whatever becomes of its path,
// and however long that is for the address of a socket.
func (p *place) path(suffix string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s%s", p.dir.Fd(), p.name, suffix)
}

func (p *place) socket(generation uint8) *net.UnixAddr {
	return &net.UnixAddr{Net: "unix", Name: p.path(fmt.Sprint(".", generation))}
}

// set locks or unlocks a byte of the lock file, and does not wait.
func (p *place) set(typ int16, at uint8) error {
	return unix.FcntlFlock(p.lock.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: typ, Start: int64(at), Len: 1})
}

// take locks a byte; false means that another device has it.
func (p *place) take(at uint8) (bool, error) {
	err := p.set(unix.F_WRLCK, at)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lock %s.lock: %w", p.name, err)
	}
	return true, nil
}

// stands reports whether the lock file is the one that others find.
func (p *place) stands() bool {
	have, err := p.lock.Stat()
	if err != nil {
		return false
	}
	found, err := os.Lstat(p.path(".lock"))
	return err == nil && os.SameFile(have, found)
}

// listen makes the socket of a generation that was taken. One that is there is a dead
// process's.
func (p *place) listen(generation uint8) (*net.UnixListener, error) {
	at := p.socket(generation)
	if err := os.Remove(at.Name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	ln, err := net.ListenUnix("unix", at)
	if err != nil {
		return nil, err
	}
	ln.SetUnlinkOnClose(false) // see leave
	return ln, nil
}

// endEntry lets the next device enter.
func (p *place) endEntry() error {
	if err := p.set(unix.F_UNLCK, entryByte); err != nil {
		return fmt.Errorf("unlock %s.lock: %w", p.name, err)
	}
	return nil
}

// leave gives up what was taken, and removes what nobody else uses: the socket of the
// generation, if that was taken, and all files, if nobody enters and the other
// generation is free.
func (p *place) leave(taken bool, generation uint8) error {
	var errs []error
	remove := func(path string) {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if taken {
		remove(p.socket(generation).Name)
	}
	alone, err := p.take(entryByte)
	for g := uint8(0); g <= 1 && alone && err == nil; g++ {
		alone, err = p.take(g)
	}
	if alone && err == nil {
		for g := range uint8(2) { // the other one's may be a dead process's
			remove(p.socket(g).Name)
		}
		remove(p.path(".lock"))
	}
	return errors.Join(cmp.Or(err, errors.Join(errs...)), p.lock.Close(), p.dir.Close())
}

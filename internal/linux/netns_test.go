// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// here is the inode of the calling thread's namespace.
func here(t testing.TB) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(selfNetNS, &st); err != nil {
		t.Error(err)
	}
	return st.Ino
}

func TestNetNS_Do(t *testing.T) {
	ns := newNS(t)
	home := here(t)
	if ns.ID() == home {
		t.Fatal("the new namespace is the old one")
	}
	boom := errors.New("boom")
	for range 100 {
		err := ns.Do(func() error {
			if got := here(t); got != ns.ID() {
				t.Errorf("in namespace %d, want %d", got, ns.ID())
			}
			return boom
		})
		if !errors.Is(err, boom) {
			t.Fatalf("do: %v, want boom", err)
		}
		if got := here(t); got != home {
			t.Fatalf("afterwards in namespace %d, want %d", got, home)
		}
	}
	if err := ns.Do(func() error { runtime.Goexit(); return nil }); !errors.Is(err, errGoexit) {
		t.Errorf("do with a function that exits: %v, want errGoexit", err)
	}
}

func TestNetNS_Cookie(t *testing.T) {
	a, b := newNS(t), newNS(t)
	first, err := a.Cookie()
	if err != nil {
		t.Fatal(err)
	}
	again, err := a.Cookie()
	if err != nil || again != first || first == 0 {
		t.Errorf("cookie %d, then %d: %v", first, again, err)
	}
	if other, err := b.Cookie(); err != nil || other == first {
		t.Errorf("another namespace has cookie %d, too: %v", other, err)
	}
}

func TestNetNS_nested(t *testing.T) {
	a, b := newNS(t), newNS(t)
	mustDo(t, a.Do(func() error {
		fromA, err := OpenNetNS(b.Path()) // home is not a
		if err != nil {
			return err
		}
		defer func() { _ = fromA.Close() }()
		err = fromA.Do(func() error {
			if got := here(t); got != b.ID() {
				t.Errorf("in namespace %d, want %d", got, b.ID())
			}
			return nil
		})
		if got := here(t); got != a.ID() {
			t.Errorf("back in namespace %d, want %d", got, a.ID())
		}
		return err
	}))
}

// TestNetNS_parallel has many goroutines in two namespaces while others see
// only the one they were started in.
func TestNetNS_parallel(t *testing.T) {
	home := here(t)
	spaces := []*NetNS{newNS(t), newNS(t)}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 50 {
				ns := spaces[i%2]
				_ = ns.Do(func() error {
					if got := here(t); got != ns.ID() {
						t.Errorf("in namespace %d, want %d", got, ns.ID())
					}
					return nil
				})
			}
		})
		wg.Go(func() {
			for range 50 {
				if got := here(t); got != home {
					t.Errorf("a bystander is in namespace %d, want %d", got, home)
				}
				runtime.Gosched()
			}
		})
	}
	wg.Wait()
}

func TestNetNS_discardsThread(t *testing.T) {
	ns := newNS(t)
	home := here(t)
	broken, err := OpenNetNS(ns.Path())
	mustDo(t, err)
	mustDo(t, unix.Close(broken.home))
	null, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	mustDo(t, err)
	broken.home = null // going back fails
	var tid int
	mustDo(t, broken.Do(func() error { tid = unix.Gettid(); return nil }))
	mustDo(t, broken.Close())
	if tid != os.Getpid() { // the main thread parks for good instead
		waitFor(t, "the end of the thread", func() bool { return errors.Is(unix.Tgkill(os.Getpid(), tid, 0), unix.ESRCH) })
	}
	for range 50 {
		done := make(chan uint64)
		go func() { done <- here(t) }()
		if got := <-done; got != home {
			t.Fatalf("a new goroutine is in namespace %d, want %d", got, home)
		}
	}
}

func TestNetNS_close(t *testing.T) {
	ns := newNS(t)
	before := openFDs(t)
	other, err := OpenNetNS(ns.Path())
	mustDo(t, err)
	mustDo(t, other.Do(func() error { // closing waits for nobody and cuts nobody
		mustDo(t, other.Close())
		if got := here(t); got != ns.ID() {
			t.Errorf("in namespace %d, want %d", got, ns.ID())
		}
		return nil
	}))
	mustDo(t, other.Close())
	if err := other.Do(func() error { return nil }); !errors.Is(err, ErrClosed) {
		t.Errorf("do: %v, want ErrClosed", err)
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d files are open, %d before", after, before)
	}
	if got := here(t); got == ns.ID() {
		t.Error("the thread stayed in the namespace")
	}
}

func TestNetNS_gone(t *testing.T) {
	f := families[0]
	ns := newNS(t)
	r := install(t, ns, testConfig(f))
	if ns.Gone() {
		t.Fatal("gone at once")
	}
	deleteNS(t, ns.Path())
	if !ns.Gone() {
		t.Fatal("not gone")
	}
	if _, err := OpenNetNS(ns.Path()); !errors.Is(err, ErrGone) {
		t.Errorf("open: %v, want ErrGone", err)
	}
	// The handle keeps the namespace alive: nothing fails in the meantime.
	mustDo(t, errors.Join(r.Renew(), r.Update(testConfig(f)), r.Remove(), Sweep(ns)))

	mustDo(t, os.WriteFile(ns.Path(), nil, 0o600)) // another file of that name
	defer func() { _ = os.Remove(ns.Path()) }()
	if !ns.Gone() {
		t.Error("not gone although another file stands there")
	}
	if _, err := OpenNetNS(ns.Path()); !errors.Is(err, ErrGone) {
		t.Errorf("open a file: %v, want ErrGone", err)
	}
}

func TestOpenNetNS_refuses(t *testing.T) {
	newNS(t)
	if _, err := OpenNetNS("/proc/self/ns/mnt"); err == nil {
		t.Error("opened a mount namespace")
	}
	if _, err := OpenNetNS("/proc/2147483647/ns/net"); !errors.Is(err, ErrGone) {
		t.Errorf("open that of no process: %v, want ErrGone", err)
	}
	ns, err := CurrentNetNS()
	mustDo(t, err)
	defer func() { mustDo(t, ns.Close()) }()
	if ns.Gone() || ns.ID() != here(t) || ns.Path() != "" {
		t.Errorf("current namespace %v: gone %t, id %d", ns, ns.Gone(), ns.ID())
	}
}

// TestAttack_netnsIsPipe: where a namespace was, or is said to be, is a pipe that nobody writes to.
func TestAttack_netnsIsPipe(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	mustDo(t, unix.Mkfifo(pipe, 0o600))
	done := make(chan error, 1)
	go func() {
		_, err := OpenNetNS(pipe)
		done <- err
	}()
	select {
	case err := <-done:
		if !errors.Is(err, ErrGone) {
			t.Errorf("error %v, want ErrGone", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("waits for the pipe")
		f, err := unix.Open(pipe, unix.O_RDWR|unix.O_CLOEXEC, 0) // ends the wait
		mustDo(t, err)
		<-done
		mustDo(t, unix.Close(f))
	}
}

// TestRedirect_leaksNothing installs, uses and removes many times.
func TestRedirect_leaksNothing(t *testing.T) {
	ns := newNS(t)
	cycle := func() {
		mine, err := OpenNetNS(ns.Path())
		mustDo(t, err)
		r, err := InstallRedirect(mine, testConfig(families[0]))
		mustDo(t, err)
		mustDo(t, errors.Join(r.Renew(), r.Remove(), Sweep(mine), mine.Close()))
	}
	cycle()
	files, threads := openFDs(t), countThreads(t)
	for range 20 {
		cycle()
	}
	if got := openFDs(t); got != files {
		t.Errorf("%d files are open, %d before", got, files)
	}
	waitFor(t, "threads to end", func() bool { return countThreads(t) <= threads+2 }) // the runtime's own
	wantClean(t, ns)
}

func countThreads(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/task")
	mustDo(t, err)
	return len(d)
}

func BenchmarkNetNS_Do(b *testing.B) {
	ns := newNS(b)
	for b.Loop() {
		_ = ns.Do(func() error { return nil })
	}
}

func BenchmarkRedirect_Renew(b *testing.B) {
	ns := newNS(b)
	r, err := InstallRedirect(ns, testConfig(families[0]))
	mustDo(b, err)
	b.Cleanup(func() { _ = r.Close() })
	for b.Loop() {
		mustDo(b, r.Renew())
	}
}

func BenchmarkDialFrom(b *testing.B) {
	ns := newNS(b)
	r, err := InstallRedirect(ns, testConfig(families[0]))
	mustDo(b, err)
	b.Cleanup(func() { _ = r.Close() })
	ln := listen(b, ns, nil, families[0].loopback, 0)
	dst := ln.Addr().(*net.TCPAddr).AddrPort()
	for b.Loop() {
		c, err := DialFrom(b.Context(), ns, families[0].loopback, testAppMark, dst)
		mustDo(b, err)
		_ = c.SetLinger(0)
		_ = c.Close()
		a, err := ln.Accept()
		mustDo(b, err)
		_ = a.Close()
	}
}

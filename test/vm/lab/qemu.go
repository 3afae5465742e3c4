// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/test/vm/lab/cpio"
	"github.com/smcr-io/kube-smcr/test/vm/lab/image"
	"github.com/smcr-io/kube-smcr/test/vm/lab/wire"
)

const (
	guestPackage = "github.com/smcr-io/kube-smcr/test/vm/lab/guest"
	pidFile      = "pid"
)

// writeInitrds writes an initramfs for each kernel: this checkout's guest program as /init, and
// behind it the modules that the image has for that kernel.
func (l *Lab) writeInitrds(ctx context.Context, images map[image.Kernel]image.Files) error {
	program := filepath.Join(l.dir, "guest")
	if err := goBuild(ctx, program, guestPackage, BuildOptions{}); err != nil {
		return err
	}
	text, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	for kernel, img := range images {
		modules, err := os.ReadFile(img.Modules)
		if err != nil {
			return err
		}
		var w cpio.Writer
		w.Dir("dev")
		w.File("init", 0o755, text)
		if err := os.WriteFile(l.initrd(kernel), append(w.Part(), modules...), 0o600); err != nil {
			return err
		}
	}
	return os.Remove(program)
}

func (l *Lab) initrd(kernel image.Kernel) string {
	return filepath.Join(l.dir, "initrd-"+string(kernel))
}

// kernel is the kernel that the guest runs: the one of its number in Config.Kernels, or the last.
func (g *Guest) kernel() image.Kernel {
	all := g.lab.cfg.Kernels
	return all[min(g.index, len(all)-1)]
}

// nicSegment is the number of the segment that the NICs are on. The segments of the PFs have the
// numbers behind it.
const nicSegment = 0

// kernelArguments are the same for all guests.
var kernelArguments = []string{
	// After a panic the guest stands still, so that the host sees the panic; an oops panics, too.
	"console=ttyS0", "quiet", "loglevel=5", "panic=0", "oops=panic",
	// Emulation has neither side channels nor secrets.
	"mitigations=off", "nokaslr", "rodata=off", "random.trust_cpu=on",
	// Each of these saves seconds of emulation in each boot, and switches off what no test uses.
	"cryptomgr.notests", "initcall_blacklist=jent_mod_init", "lsm=", "audit=0", "amd_pstate=disable", "tsc=reliable", "net.ifnames=0",
	// These are work in each system call, page fault or switch of tasks: memory that is zeroed
	// before its owner writes it, and accounts of pressure and of memory that nobody reads.
	"init_on_alloc=0", "psi=0", noMemoryAccounts,
	// With random addresses QEMU translates the C library again for each program that starts, which
	// is most of the time that a small one takes.
	"norandmaps",
	// Four levels of page tables are walked faster than five.
	"no5lvl",
}

// noMemoryAccounts is the one of them that containers would miss.
const noMemoryAccounts = "cgroup_disable=memory"

// coarseTimers is for guests where Go programs of all kinds sleep for some microseconds again and
// again. Timers that fire with the clock's tick only, at 250 Hz, save most of these switches of tasks,
// each of which makes QEMU forget what it knows of the address space.
const coarseTimers = "highres=off"

// processor returns the processor of the guest: all that QEMU can emulate, without two features.
//
//   - erms and fsrm, fast string moves: the kernel would copy by them, and QEMU emulates them byte
//     by byte. Without them a stream of TCP takes half the processor time.
//   - cx16, CMPXCHG16B: the kernel would allocate memory by it. Two kernels of version 6.12 crashed
//     right behind that instruction, with flags that were bits of a pointer. Later kernels keep the
//     feature, which they need for the storage of eBPF programs.
func (g *Guest) processor() string {
	const p = "max,-erms,-fsrm"
	if g.kernel() == image.SMC {
		return p + ",-cx16"
	}
	return p
}

// arguments returns QEMU's arguments for the guest. Guest 0 is the hub of each segment: every other
// guest is connected to guest 0 by one socket.
func (g *Guest) arguments(img image.Files, initrd string) []string {
	cfg := g.lab.cfg
	share := "local,id=host,path=" + g.lab.Share() + ",security_model=none,multidevs=remap"
	line := append(
		slices.Concat(kernelArguments, counterArguments(cpuinfo())),
		"lab.name="+g.Name(), "lab.guest="+strconv.Itoa(g.index), "lab.nics="+strconv.Itoa(cfg.NICs), "lab.pfs="+strconv.Itoa(cfg.PFs), "lab.mtu="+strconv.Itoa(cfg.MTU),
		"lab.modules="+strings.Join(cfg.Modules, ","),
	)
	if cfg.PFs > 0 {
		line = append(line, pfKernelArguments[:]...)
	}
	if cfg.Containers {
		line = slices.DeleteFunc(line, func(argument string) bool { return argument == noMemoryAccounts })
	}
	if cfg.CoarseTimers {
		line = append(line, coarseTimers)
	}
	args := []string{
		"-name", cfg.Name + "-" + g.Name(), "-M", "q35", "-accel", fmt.Sprintf("tcg,thread=multi,tb-size=%d", translationMiB), "-cpu", g.processor(), "-smp", strconv.Itoa(cfg.Processors), "-m", strconv.Itoa(cfg.MemoryMiB),
		"-nodefaults", "-no-user-config", "-display", "none",
		"-kernel", img.Kernel, "-initrd", initrd, "-append", strings.Join(line, " "),
		"-serial", "file:" + g.consoleFile(), "-qmp", "unix:" + g.monitorSocket() + ",server=on,wait=off",
		"-drive", "if=none,id=disk,format=raw,readonly=on,file.locking=off,file=" + img.Disk, "-device", "virtio-blk-pci,drive=disk",
		"-fsdev", share, "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
		"-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng",
		"-device", "virtio-serial-pci,max_ports=" + strconv.Itoa(wire.Ports+1),
	}
	for n := range wire.Ports {
		args = append(
			args, "-chardev", fmt.Sprintf("socket,id=port%d,path=%s,server=on,wait=off", n, g.portSocket(n)),
			"-device", fmt.Sprintf("virtserialport,nr=%d,chardev=port%d,name=%s", n+1, n, wire.PortName(n)),
		)
	}
	args = append(args, g.segment(nicSegment)...)
	for n := range cfg.NICs {
		args = append(
			args, "-netdev", fmt.Sprintf("hubport,id=net%d,hubid=0", n),
			"-device", fmt.Sprintf("virtio-net-pci,id=%s,netdev=net%d,mac=%s,host_mtu=%d,addr=0x%x", nicID(n), n, wire.MAC(g.index, n), cfg.MTU, 0x10+n),
		)
	}
	for n, disk := range cfg.Disks {
		id := fmt.Sprintf("disk%d", n)
		args = append(
			args, "-drive", "if=none,id="+id+",format=raw,snapshot=on,cache=unsafe,file.locking=off,file="+disk,
			"-device", fmt.Sprintf("virtio-blk-pci,drive=%s,addr=0x%x", id, firstDiskSlot+n),
		)
	}
	return append(args, g.pfArguments()...)
}

// firstDiskSlot is the number of the PCI slot of the first of Config.Disks, behind those of the
// NICs.
const firstDiskSlot = 0x1a

// segment returns the arguments that connect the guest's hub of segment n to the hubs of other
// guests. Guest 0 listens, and so must start first.
func (g *Guest) segment(n int) []string {
	var args []string
	for _, other := range g.trunks() {
		server, id := "off", trunk(n, g.index)
		if g.index == 0 {
			server, id = "on", trunk(n, other)
		}
		args = append(
			args, "-netdev", fmt.Sprintf("stream,id=%s,server=%s,addr.type=unix,addr.path=%s", id, server, filepath.Join(g.lab.dir, id)),
			"-netdev", fmt.Sprintf("hubport,id=hub-%s,hubid=%d,netdev=%s", id, n, id),
		)
	}
	return args
}

// trunks returns the numbers of the guests to which this guest is connected. A guest that is alone
// has a connection, too, which leads nowhere: a hub with no other port takes nothing from a NIC, and
// the NIC does not try again when another port comes.
func (g *Guest) trunks() []int {
	if g.index > 0 {
		return []int{0}
	}
	var others []int
	for i := 1; i < max(g.lab.cfg.Guests, 2); i++ {
		others = append(others, i)
	}
	return others
}

func nicID(n int) string { return fmt.Sprintf("nic%d", n) }

// trunk returns the name of a guest's connection to guest 0 in a segment; the connection's socket
// has the same name.
func trunk(segment, guest int) string { return fmt.Sprintf("trunk%d-%d", segment, guest) }

// A keeper starts the QEMUs and ends them. The kernel kills a QEMU when the thread that started it
// ends (Pdeathsig), and Go's threads come and go, so one thread starts all of them and does nothing
// else.
type keeper struct {
	detach bool
	work   chan func()
	done   sync.WaitGroup

	commands []*exec.Cmd
}

func newKeeper(detach bool) *keeper {
	k := &keeper{detach: detach, work: make(chan func())}
	k.done.Go(func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		for f := range k.work {
			f()
		}
	})
	return k
}

// start starts the QEMU of a guest, and waits until others can connect to it.
func (k *keeper) start(g *Guest, qemu image.Emulator, args []string, lock *os.File) error {
	if err := os.MkdirAll(g.dir(), 0o700); err != nil {
		return err
	}
	log, err := os.Create(g.logFile())
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	cmd := exec.Command(qemu.Program, append(qemu.Args, args...)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{lock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is for this program, which ends QEMU in order
	if !k.detach {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	errs := make(chan error)
	k.work <- func() { errs <- cmd.Start() }
	if err := <-errs; err != nil {
		return fmt.Errorf("start QEMU (install qemu-system-x86): %w", err)
	}
	k.commands = append(k.commands, cmd)
	k.done.Go(func() {
		g.ended(cmd.Wait())
	})
	if err := os.WriteFile(filepath.Join(g.dir(), pidFile), strconv.AppendInt(nil, int64(cmd.Process.Pid), 10), 0o600); err != nil {
		return err
	}
	// QEMU answers its monitor only when it listens on all other sockets, too.
	err = poll(context.Background(), "QEMU of "+g.Name(), monitorTimeout, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), monitorTimeout)
		defer cancel()
		err := g.tryOrder(ctx, "query-status", nil)
		if g.failure() != nil {
			return nil // QEMU ended: the caller gets the reason
		}
		return err
	})
	return errors.Join(err, g.failure())
}

// stop kills the QEMUs and waits for them.
func (k *keeper) stop() error {
	var errs []error
	for _, cmd := range k.commands {
		if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			errs = append(errs, fmt.Errorf("kill QEMU %d: %w", cmd.Process.Pid, err))
		}
	}
	close(k.work)
	done := make(chan struct{})
	go func() {
		k.done.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(stopTimeout):
		errs = append(errs, errors.New("a killed QEMU does not end"))
	}
	return errors.Join(errs...)
}

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

// writeInitrds puts the program of this checkout before the modules of the images.
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

// kernel is what the guest runs.
func (g *Guest) kernel() image.Kernel {
	all := g.lab.cfg.Kernels
	return all[min(g.index, len(all)-1)]
}

// nicSegment is the number of the segment that the NICs are on. Those of the PFs
// follow.
const nicSegment = 0

// kernelArguments are the same for all guests.
var kernelArguments = []string{
	// A panic stays, so that the host sees it, and an oops is one.
	"console=ttyS0", "quiet", "loglevel=5", "panic=0", "oops=panic",
	// Emulation has neither side channels nor secrets.
	"mitigations=off", "nokaslr", "rodata=off", "random.trust_cpu=on",
	// What costs seconds of emulation in each boot, and what nobody here uses.
	"cryptomgr.notests", "initcall_blacklist=jent_mod_init", "lsm=", "audit=0", "amd_pstate=disable", "tsc=reliable", "net.ifnames=0",
}

// processor is all that QEMU emulates but for two things. By fast string moves the
// kernel would copy, and they are emulated byte by byte: a stream of TCP takes half the
// processor's time without. By CMPXCHG16B it would allocate memory: two kernels of 6.12
// crashed behind that instruction, with flags that were bits of a pointer. Later ones
// need it for the storage of eBPF programs.
func (g *Guest) processor() string {
	const p = "max,-erms,-fsrm"
	if g.kernel() == image.SMC {
		return p + ",-cx16"
	}
	return p
}

// arguments are those of QEMU. Guest 0 is the hub of the segment: the others are
// connected to it by sockets, one each.
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
	args := []string{
		"-name", cfg.Name + "-" + g.Name(), "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", g.processor(), "-smp", "1", "-m", strconv.Itoa(cfg.MemoryMiB),
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
	return append(args, g.pfArguments()...)
}

// segment joins the hub of a segment to those of the other guests. Guest 0
// listens. To a guest that came before that QEMU would say nothing.
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

// trunks are the guests to which this one has a trunk.
func (g *Guest) trunks() []int {
	if g.index > 0 {
		return []int{0}
	}
	var others []int
	for i := 1; i < g.lab.cfg.Guests; i++ {
		others = append(others, i)
	}
	return others
}

func nicID(n int) string { return fmt.Sprintf("nic%d", n) }

// trunk is the name of a guest's trunk in a segment, and of its socket.
func trunk(segment, guest int) string { return fmt.Sprintf("trunk%d-%d", segment, guest) }

// A keeper starts the QEMUs and ends them. The kernel ends them too when the
// thread that started them ends: so there is one that only does that.
type keeper struct {
	detach bool
	work   chan func()
	done   sync.WaitGroup

	commands []*exec.Cmd
}

func newKeeper(detach bool) *keeper {
	k := &keeper{detach: detach, work: make(chan func())}
	k.done.Go(func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with it
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
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is for us
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
	// It takes orders when all else is there: it listens for ports and trunks.
	err = poll(context.Background(), "QEMU of "+g.Name(), monitorTimeout, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), monitorTimeout)
		defer cancel()
		err := g.tryOrder(ctx, "query-status", nil)
		if g.failure() != nil {
			return nil // it ended
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

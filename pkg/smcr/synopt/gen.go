// SPDX-License-Identifier: Apache-2.0

package synopt

// The objects are committed, so that building needs no clang. Rebuilding them
// needs clang, llvm-strip, the kernel's user space headers and libbpf-dev; the
// two include directories are where Debian keeps asm/types.h.
//
//go:generate go tool -modfile=../../../tools/pinned/go.mod bpf2go -go-package synopt -output-stem program -no-global-types -target bpfel,bpfeb program bpf/synopt.bpf.c -- -Wall -Wextra -Werror -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu
//go:generate sh -c "sha256sum bpf/*.[ch] gen.go *_bpfe[bl].* >bpf/objects.sha256"

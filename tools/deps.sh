#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the Debian or Ubuntu packages that a make target needs and that this
# machine lacks. Says nothing when nothing is missing.
#
#   tools/deps.sh compile    what compiling all packages needs
#   tools/deps.sh runtime    what the tests, the demo and the benchmark run, too
#   tools/deps.sh generate   what rebuilding generated files needs
set -euo pipefail

# One line per package: the command or file that shows it is there, what it is
# for.
compile='
gcc                         gcc                        the race detector (cgo)
libc6-dev                   /usr/include/stdlib.h      the race detector (cgo)
libibverbs-dev              /usr/include/infiniband/verbs.h  RDMA devices of the kernel (cgo)
ca-certificates             /etc/ssl/certs/ca-certificates.crt  downloads of Go modules
'
runtime=$compile'
iproute2                    ip                         network namespaces of tests and demo
ethtool                     ethtool                    tests: segmentation offload
nftables                    nft                        inspection of redirect rules
tcpdump                     tcpdump                    capture of the demo traffic
tshark                      tshark                     independent decoding of our packets
curl                        curl                       demo: HTTP client
nginx                       nginx                      demo: HTTP server
redis-server                redis-server               demo: redis server
redis-tools                 redis-benchmark            demo: redis client
iperf3                      iperf3                     demo: stream throughput
memcached                   memcached                  tests: the suites of applications
tcl                         tclsh                      tests: the suite of redis
perl                        perl                       tests: the suites of memcached and curl
make                        make                       tests: building the suite of curl
haproxy                     haproxy                    benchmark: the relay we compare with
containernetworking-plugins /usr/lib/cni/host-local    demo: the CNI plugins before ours in the chain
runc                        runc                       local cluster: starts the containers
qemu-system-x86             qemu-system-x86_64         guests: rxe and SMC-R of Linux
debian-archive-keyring      /usr/share/keyrings/debian-archive-keyring.gpg  guests: their programs are of Debian
e2fsprogs                   mke2fs                     guests: their disk
kmod                        depmod                     guests: modules of their kernel
xz-utils                    xz                         guests: modules of their kernel
zstd                        zstd                       guests: their kernel
iptables                    iptables                   local cluster: services, by kube-proxy
'
generate='
clang                       clang                      compiles the eBPF programs
llvm                        llvm-strip                 strips the eBPF objects
libbpf-dev                  /usr/include/bpf/bpf_helpers.h  headers of the eBPF programs
linux-libc-dev              /usr/include/linux/bpf.h   headers of the eBPF programs
'

case "${1:-}" in
compile) wanted=$compile ;;
runtime) wanted=$runtime ;;
generate) wanted=$generate ;;
*)
	echo "usage: $0 compile|runtime|generate" >&2
	exit 2
	;;
esac

PATH=$PATH:/usr/sbin:/sbin:/usr/local/go/bin

if ! command -v go >/dev/null; then
	echo "deps: go is not in PATH; install Go 1.26 or newer from https://go.dev/dl" >&2
	exit 1
fi

packages=()
reasons=()
while read -r package probe reason; do
	[ -n "$package" ] || continue
	case "$probe" in
	/*) [ ! -e "$probe" ] || continue ;;
	*) ! command -v "$probe" >/dev/null || continue ;;
	esac
	packages+=("$package")
	reasons+=("$(printf '%-28s %s' "$package" "$reason")")
done <<<"$wanted"

[ ${#packages[@]} -gt 0 ] || exit 0

echo "deps: missing on this machine:"
printf '  %s\n' "${reasons[@]}"

if [ "$(id -u)" -ne 0 ]; then
	echo "deps: not root, so nothing was installed. Install them with" >&2
	echo "  sudo apt-get install --no-install-recommends ${packages[*]}" >&2
	exit 1
fi
if ! command -v apt-get >/dev/null; then
	echo "deps: this machine has no apt-get; install the equivalents of: ${packages[*]}" >&2
	exit 1
fi

# The packages bring daemons (nginx, redis, haproxy, memcached). The demo runs its own
# copies in its own namespaces; the machine's must not start. A policy-rc.d
# that somebody else put there is left alone.
policy=/usr/sbin/policy-rc.d
made_policy=
cleanup() {
	[ -z "$made_policy" ] || rm -f "$policy"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if [ ! -e "$policy" ]; then
	made_policy=yes
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod 0755 "$policy"
fi

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
apt() {
	if ! apt-get -q -y -o DPkg::Lock::Timeout=300 "$@" >"$log" 2>&1; then
		cat "$log" >&2
		echo "deps: apt-get $* ended with an error; its output is above" >&2
		rm -f "$log"
		exit 1
	fi
}
echo "deps: apt-get update"
apt update
echo "deps: apt-get install ${packages[*]}"
apt install --no-install-recommends "${packages[@]}"
rm -f "$log"

# Installation also enables the daemons for the next boot. Undo that for the
# packages that were not here before.
for package in "${packages[@]}"; do
	case "$package" in
	nginx | redis-server | haproxy | memcached) ;;
	*) continue ;;
	esac
	update-rc.d "$package" disable >/dev/null 2>&1 || true
	if command -v systemctl >/dev/null; then
		systemctl disable "$package" >/dev/null 2>&1 || true
	fi
done
echo "deps: installed ${#packages[@]} packages; their services are not running and not enabled"

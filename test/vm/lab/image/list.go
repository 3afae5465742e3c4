// SPDX-License-Identifier: Apache-2.0

package image

import "github.com/smcr-io/kube-smcr/internal/testenv/debian"

const (
	suite   = "bookworm"
	keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
)

// A Kernel is the name of a kernel that guests can have.
type Kernel string

const (
	// SMC is the kernel that guests have unless a test asks for another one: it has
	// SMC-R, and soft RoCE in the first network namespace.
	SMC Kernel = "6.12.95+deb12-amd64"

	// NetNS is a newer kernel, whose soft RoCE works in every network namespace. Debian builds it
	// without SMC.
	NetNS Kernel = "7.2.12+deb13-amd64"
)

// kernelPackages are the Debian packages of a kernel: the one with the kernel itself, and for some
// kernels another one with the modules.
type kernelPackages struct {
	packages []debian.File
	lacks    []string // modules of the lists below that the kernel does not have
}

var kernels = map[Kernel]kernelPackages{
	SMC: {packages: []debian.File{{
		Dir:    "pool/main/l/linux-signed-amd64/",
		Name:   "linux-image-6.12.95+deb12-amd64_6.12.95-1~bpo12+1_amd64.deb",
		SHA256: "5e524b782be67cb0d6a2e7b51816a2ac519e573ef7324b9a63a4124365653ecc",
	}}},
	NetNS: {
		packages: []debian.File{
			{
				Dir:    "pool/main/l/linux-signed-amd64/",
				Name:   "linux-binary-7.2.12+deb13-amd64_7.2.12-1~bpo13+1_amd64.deb",
				SHA256: "0d916c7f1310a7cb0567f235785d1c4511d894eb95e9810a2bc1f67e7ec18c2f",
			},
			{
				Dir:    "pool/main/l/linux/",
				Name:   "linux-base-7.2.12+deb13-amd64_7.2.12-1~bpo13+1_amd64.deb",
				SHA256: "51c6a66bf190239492b16354c6212969d597220c3dbec1deacdab9dc151916f0",
			},
			{
				Dir:    "pool/main/l/linux/",
				Name:   "linux-modules-7.2.12+deb13-amd64_7.2.12-1~bpo13+1_amd64.deb",
				SHA256: "abd8aad34e82ae541ec596eafa9ac84bbcddf943c5de051d330516c3dff395d6",
			},
		},
		lacks: []string{"smc", "smc_diag", "crc32_generic", "crc32_pclmul", "crc32c_generic", "nfnetlink"},
	},
}

// qemuPackages are the packages of a QEMU that emulates igb, a NIC with virtual functions; Debian
// 12's own QEMU does not. The libraries that both depend on are the same.
var qemuPackages = [...]debian.File{
	{
		Dir: "pool/main/q/qemu/", Name: "qemu-system-x86_10.0.2+ds-2+deb13u1~bpo12+1_amd64.deb",
		SHA256: "4a6b1856c8b0d7df4ff8e70249e12c473ccf8d516aadb4ae14d3d938faed0c65",
	},
	{
		Dir: "pool/main/q/qemu/", Name: "qemu-system-common_10.0.2+ds-2+deb13u1~bpo12+1_amd64.deb",
		SHA256: "23a4672a138832d7173855e981aa8282c73ef5e04e080fa7ada9f82c6b34f507",
	},
	{
		Dir: "pool/main/q/qemu/", Name: "qemu-system-data_10.0.2+ds-2+deb13u1~bpo12+1_all.deb",
		SHA256: "2d831088187087013b3fcbd19bdfb955b182a2d5a08f6dafa0ad1c6d2007fb4e",
	},
	{
		Dir: "pool/main/s/seabios/", Name: "seabios_1.16.3-2~bpo12+1_all.deb",
		SHA256: "48390d0a534c66d11789e39518aa219773a9d3677b29fe1af8799dfb563ec713",
	},
}

// modulePackages are the sources of the kernel [SMC], and what modules for that kernel are built with.
var modulePackages = [...]debian.File{
	{
		Dir: "pool/main/l/linux/", Name: "linux-headers-6.12.95+deb12-amd64_6.12.95-1~bpo12+1_amd64.deb",
		SHA256: "4e2a9dcc7c6ac48ec6570957fc17fc7669826159a56a6313bf086ac1acd399dd",
	},
	{
		Dir: "pool/main/l/linux/", Name: "linux-headers-6.12.95+deb12-common_6.12.95-1~bpo12+1_all.deb",
		SHA256: "5f0ddff86b25a7c8ba07ee2e6f7f74b17d4c0a3f621b08b50fa91290e689fd72",
	},
	{
		Dir: "pool/main/l/linux/", Name: "linux-kbuild-6.12.95+deb12_6.12.95-1~bpo12+1_amd64.deb",
		SHA256: "7770286db28850f6d589c89908823368cdd4aca3e489155fdcc371d95c103cbc",
	},
	{
		Dir: "pool/main/l/linux/", Name: "linux-source-6.12_6.12.95-1~bpo12+1_all.deb",
		SHA256: "a7fe4673af74236c99dad9766eca714a198e50a07e5d659e63ec312ae6afccfe",
	},
}

// moduleSource is the archive of the kernel's sources in the last of modulePackages.
const moduleSource = "linux-source-6.12.tar.xz"

// packages are the Debian packages on the guests' disk. Those that they depend on are added.
var packages = [...]string{
	// A system.
	"dash", "bash", "coreutils", "grep", "sed", "mawk", "findutils", "util-linux", "mount", "procps", "psmisc", "kmod",
	"hostname", "netbase",
	// The network.
	"iproute2", "iputils-ping", "ethtool", "nftables", "tcpdump", "netcat-openbsd", "socat", "bpftool",
	// RDMA.
	"rdma-core", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "perftest", "librdmacm1", "libibverbs1",
	// Containers.
	"runc",
	// Applications.
	"redis-server", "redis-tools", "nginx-light", "libnginx-mod-stream", "curl", "iperf3",
	// What tells why.
	"strace",
}

// bootModules are the modules for the root file system and for the host's files. The guest loads
// them from the initramfs, in this order.
var bootModules = [...]string{
	"virtio_blk", "crc32c_generic", "ext4", "overlay", "9p", "9pnet_virtio", "virtio_net", "virtio_rng",
}

// modules are the modules on the guests' disk. Those that they depend on are added.
var modules = [...]string{
	"ib_core", "ib_uverbs", "ib_umad", "rdma_cm", "rdma_ucm", "rdma_rxe", "crc32_generic", "crc32_pclmul",
	"smc", "smc_diag", "inet_diag", "tcp_diag", "udp_diag",
	"nf_tables", "nft_nat", "nft_chain_nat", "nft_redir", "nft_masq", "nft_ct", "nft_socket", "nft_tproxy", "nft_compat", "nft_queue", "nfnetlink_queue", "xt_NFQUEUE",
	"nft_reject_inet", "nft_reject_ipv4", "nft_reject_ipv6", "nft_log", "nft_limit", "nft_quota", "nft_fib_inet", "nf_conntrack", "nf_conntrack_netlink",
	"xt_mark", "xt_tcpudp", "nfnetlink",
	"nft_numgen", "br_netfilter", // Services, by kube-proxy
	"veth", "bridge", "dummy", "macvlan", "ipvlan", "8021q", "bonding", "tun", "vxlan", "ifb", "vrf",
	"sch_netem", "sch_tbf", "sch_ingress", "sch_htb", "sch_fq", "cls_bpf", "cls_u32", "cls_flower", "cls_matchall",
	"igb", "igbvf", "pci_stub", "vfio_pci",
	"act_mirred", "act_gact", "act_bpf", "netconsole", "fuse", "squashfs", "loop",
}

// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/*
 * Writes the SMC-R TCP option (RFC 7609 A.1) on the handshakes of the sockets
 * of one cgroup that carry one mark, and keeps what the SYN-ACK answered.
 *
 *   connect()  CONNECT_CB      marked: remember WAITING, ask for HDR_OPT calls
 *     SYN ->   HDR_OPT_LEN_CB  room for six bytes
 *              WRITE_HDR_OPT_CB the option
 *   <- SYN-ACK ACTIVE_ESTABLISHED_CB  OFFERED or PLAIN; no more calls
 *
 *   listen()   LISTEN_CB       marked: ask for HDR_OPT calls (children inherit)
 *   -> SYN
 *   SYN-ACK -> HDR_OPT_LEN_CB, WRITE_HDR_OPT_CB  only if the SYN had it and
 *                              its state is kept (no syncookie)
 *   -> ACK     PASSIVE_ESTABLISHED_CB  no more calls for the child
 *
 * Other programs may be on the same cgroup or above it: one of another agent,
 * or something else that writes options. They share the flag that asks for
 * HDR_OPT calls, so a call says nothing about whose socket it is, and the flag
 * must not be taken from somebody who set it before us.
 *
 * Rebuild the object with `go generate` in the directory above. The Go side is
 * option_linux.go; it knows struct handshake and enum answer too.
 */

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define OPT_KIND 254
#define OPT_LEN 6
#define OPT_MAGIC 0xE2D4C3D9 /* "SMCR" in EBCDIC */

#define TCP_SYN 0x02
#define TCP_ACK 0x10

/*
 * A SYN that was lost this many times goes out without the option: something
 * on the path may drop SYNs with options it does not know.
 */
#define SYN_RETRIES_WITH_OPTION 1

enum answer {
	WAITING = 1, /* the SYN offers, the SYN-ACK is not here yet */
	PLAIN = 2,   /* the SYN-ACK came without the option */
	OFFERED = 3, /* the SYN-ACK carried the option */
};

struct handshake {
	__u32 answer; /* enum answer */
	__u32 shared; /* somebody else wanted HDR_OPT calls before */
};

struct option {
	__u8 kind;
	__u8 len;
	__be32 magic;
} __attribute__((packed));

/* Which sockets are ours; 0 selects none. Set before the program is loaded. */
volatile const __u32 wanted_mark = 0;

/* One for each socket that connects; goes away with the socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct handshake);
} handshakes SEC(".maps");

static __always_inline bool is_wanted(const struct bpf_sock *sk)
{
	return wanted_mark != 0 && sk->mark == wanted_mark;
}

static __always_inline void want_header_calls(struct bpf_sock_ops *ctx, bool on)
{
	__u32 flags = ctx->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;

	if (on)
		flags |= BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
	bpf_sock_ops_cb_flags_set(ctx, flags);
}

static __always_inline bool gets_header_calls(const struct bpf_sock_ops *ctx)
{
	return ctx->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
}

/* Whether the received packet (flags 0) or the SYN that began all has it. */
static __always_inline bool has_option(struct bpf_sock_ops *ctx, __u64 flags)
{
	struct option o = { OPT_KIND, OPT_LEN, bpf_htonl(OPT_MAGIC) };

	/* A longer option of that kind and magic gives -ENOSPC: not ours. */
	return bpf_load_hdr_opt(ctx, &o, sizeof(o), flags) == OPT_LEN;
}

/* Whether the SYN now being built shall carry the option. */
static __always_inline bool syn_carries_option(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct handshake *h;

	if (!sk || ctx->total_retrans > SYN_RETRIES_WITH_OPTION)
		return false;
	h = bpf_sk_storage_get(&handshakes, sk, 0, 0);
	return h && h->answer == WAITING;
}

/* Whether the packet now being built shall carry the option. */
static __always_inline bool carries_option(struct bpf_sock_ops *ctx)
{
	switch (ctx->skb_tcp_flags & (TCP_SYN | TCP_ACK)) {
	case TCP_SYN:
		return syn_carries_option(ctx);
	case TCP_SYN | TCP_ACK:
		/*
		 * With a syncookie nothing is kept of the SYN: we would offer
		 * now and not know it when the connection is there.
		 */
		if (ctx->args[0] == BPF_WRITE_HDR_TCP_SYNACK_COOKIE)
			return false;
		return has_option(ctx, BPF_LOAD_HDR_OPT_TCP_SYN);
	default:
		return false;
	}
}

static __always_inline void on_connect(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct handshake *h;

	if (!sk || !is_wanted(sk))
		return;
	/* Without a place for the answer there must be no offer. */
	h = bpf_sk_storage_get(&handshakes, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!h)
		return;
	h->answer = WAITING;
	h->shared = gets_header_calls(ctx);
	want_header_calls(ctx, true);
}

static __always_inline void on_connected(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct handshake *h;

	if (!sk)
		return;
	h = bpf_sk_storage_get(&handshakes, sk, 0, 0);
	if (!h || h->answer != WAITING)
		return;
	h->answer = has_option(ctx, 0) ? OFFERED : PLAIN;
	if (!h->shared)
		want_header_calls(ctx, false);
}

static __always_inline void on_listen(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	if (sk && is_wanted(sk))
		want_header_calls(ctx, true);
}

/* A child has its listener's mark and its wish for HDR_OPT calls. */
static __always_inline void on_accepted(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	if (sk && is_wanted(sk))
		want_header_calls(ctx, false);
}

SEC("sockops")
int smcr_option(struct bpf_sock_ops *ctx)
{
	struct option o = { OPT_KIND, OPT_LEN, bpf_htonl(OPT_MAGIC) };

	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		on_connect(ctx);
		break;
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		on_listen(ctx);
		break;
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
		if (carries_option(ctx))
			bpf_reserve_hdr_opt(ctx, OPT_LEN, 0);
		break;
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		if (carries_option(ctx))
			bpf_store_hdr_opt(ctx, &o, sizeof(o), 0);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		on_connected(ctx);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		on_accepted(ctx);
		break;
	}
	return 1;
}

/* No helper used here asks for the GPL; the kernel's list knows this string. */
char _license[] SEC("license") = "Dual BSD/GPL";

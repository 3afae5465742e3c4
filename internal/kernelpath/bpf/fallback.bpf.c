// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/*
 * Tells of connections of chosen network namespaces and cgroups that the kernel's SMC made TCP, and why.
 *
 *   smc_switch_to_fallback   tracepoint of SMC: an event, if the socket has a peer
 *
 * Sockets without a peer, which became TCP by an option that SMC does not have, are in the kernel's counters only.
 * One namespace or cgroup has a bounded number of events a second: there is room for the others' then.
 *
 * Rebuild the object with `go generate` in the directory above. The Go side is fallback.go; it knows
 * struct event too.
 */

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "rules.bpf.h"

#define AF_INET 2
#define ROOM (64 * 1024) /* bytes of events that nobody has read yet: some 800 */
#define MOST_A_SECOND 100 /* of a namespace, or a cgroup */
#define SECOND 1000000000ull /* in ns */

/* Parts of the kernel's types, found by BTF when the program is loaded. */
struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	struct {
		struct net *net;
	} skc_net;
	struct {
		__u8 bytes[16];
	} skc_v6_daddr, skc_v6_rcv_saddr;
} __attribute__((preserve_access_index));
struct kernfs_node {
	__u64 id;
} __attribute__((preserve_access_index));
struct cgroup {
	struct kernfs_node *kn;
	int level; /* how many are above it */
	struct cgroup *ancestors[]; /* from the root on, itself the last one */
} __attribute__((preserve_access_index));
struct sock_cgroup_data {
	struct cgroup *cgroup;
} __attribute__((preserve_access_index));
struct sock {
	struct sock_common __sk_common;
	struct sock_cgroup_data sk_cgrp_data;
} __attribute__((preserve_access_index));
struct socket {
	struct sock *sk;
} __attribute__((preserve_access_index));
struct smc_sock {
	struct socket *clcsock; /* of TCP */
	struct smc_sock *listen_smc; /* that accepted it */
	__u32 peer_diagnosis;
} __attribute__((preserve_access_index));

struct event {
	__u64 netns; /* cookie */
	__u32 reason, peer_reason; /* diagnosis codes of CLC */
	__u32 inbound;
	__u16 family, local_port, peer_port, pad;
	__u8 local[16], peer[16]; /* of IPv4 the first four bytes */
	__u32 pad2;
	__u64 cgroup; /* that was chosen; 0: the namespace was */
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, ROOM);
} events SEC(".maps");

/* How many events a namespace or a cgroup had since a time. */
struct told {
	__u64 since; /* ns */
	__u64 events;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_RULES);
	__type(key, __u64); /* cookie, or ID and OF_CGROUP */
	__type(value, struct told);
} told SEC(".maps");

#define OF_CGROUP (1ull << 63)

/*
 * The cgroup that is chosen of those of a socket: the deepest one with a rule, unless that says otherwise. 0 if there
 * is none. A socket of the kernel, as the one of TCP below SMC's, has the cgroup of the program for which it was made, and
 * one that was accepted that of the listener.
 */
static __always_inline __u64 chosen_cgroup(struct sock *sk)
{
	struct cgroup *cgroup = BPF_CORE_READ(sk, sk_cgrp_data.cgroup);
	struct cgroup **ancestors;
	int level, deepest;

	if (!cgroup)
		return 0;
	deepest = BPF_CORE_READ(cgroup, level);
	ancestors = __builtin_preserve_access_index(&cgroup->ancestors[0]);
	for (level = MAX_DEPTH; level > 0; level--) {
		struct cgroup *above;
		struct rule *r;
		__u64 id;

		if (level > deepest || bpf_probe_read_kernel(&above, sizeof(above), &ancestors[level]))
			continue;
		id = BPF_CORE_READ(above, kn, id);
		r = bpf_map_lookup_elem(&cgroups, &id);
		if (r)
			return r->choice == SMC ? id : 0;
	}
	return 0;
}

static __always_inline bool may_tell(__u64 whose)
{
	struct told first = {.since = bpf_ktime_get_ns(), .events = 1};
	struct told *t = bpf_map_lookup_elem(&told, &whose);

	if (!t || first.since - t->since >= SECOND) {
		bpf_map_update_elem(&told, &whose, &first, BPF_ANY);
		return true;
	}
	return __sync_fetch_and_add(&t->events, 1) < MOST_A_SECOND;
}

SEC("tp_btf/smc_switch_to_fallback")
int BPF_PROG(fell_back, struct smc_sock *smc, int reason)
{
	struct event *e;
	struct rule *r;
	struct sock *sk;
	__u64 netns, cgroup;
	__u16 port;

	if (!smc) /* the verifier asks; it never is */
		return 0;
	barrier_var(smc); /* the compiler may not add to it before the question */
	sk = BPF_CORE_READ(smc, clcsock, sk);
	if (!sk)
		return 0;
	port = bpf_ntohs(BPF_CORE_READ(sk, __sk_common.skc_dport));
	netns = BPF_CORE_READ(sk, __sk_common.skc_net.net, net_cookie);
	if (!port)
		return 0;
	cgroup = chosen_cgroup(sk);
	if (!cgroup) {
		r = bpf_map_lookup_elem(&namespaces, &netns);
		if (!r || r->choice != SMC)
			return 0;
	}
	if (!may_tell(cgroup ? cgroup | OF_CGROUP : netns))
		return 0;
	e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e)
		return 0;
	__builtin_memset(e, 0, sizeof(*e));
	e->netns = netns;
	e->cgroup = cgroup;
	e->reason = reason;
	e->peer_reason = BPF_CORE_READ(smc, peer_diagnosis);
	e->inbound = BPF_CORE_READ(smc, listen_smc) != NULL;
	e->family = BPF_CORE_READ(sk, __sk_common.skc_family);
	e->local_port = BPF_CORE_READ(sk, __sk_common.skc_num);
	e->peer_port = port;
	if (e->family == AF_INET) {
		bpf_core_read(e->local, 4, &sk->__sk_common.skc_rcv_saddr);
		bpf_core_read(e->peer, 4, &sk->__sk_common.skc_daddr);
	} else {
		bpf_core_read(e->local, 16, &sk->__sk_common.skc_v6_rcv_saddr);
		bpf_core_read(e->peer, 16, &sk->__sk_common.skc_v6_daddr);
	}
	bpf_ringbuf_submit(e, 0);
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";

// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/*
 * Makes TCP sockets of chosen pods sockets of the kernel's SMC.
 *
 *   socket(AF_INET*, SOCK_STREAM, 0, IPPROTO_TCP or IPPROTO_MPTCP)
 *     -> update_socket_protocol()   fmod_ret: IPPROTO_SMC if the task is chosen
 *
 * Who is chosen is in two maps, by cgroup and by network namespace. A cgroup's
 * word counts more than the namespace's, that of a deeper cgroup more than that
 * of one above it. Programs of this hook are a chain in which the first one that
 * returns anything but 0 decides: 0 leaves the protocol to the next one and, in
 * the end, to the caller. So 0 is also what a task gets that is not chosen.
 *
 * Rebuild the object with `go generate` in the directory above. The Go side is
 * chooser.go; it knows struct rule and enum choice too.
 */

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "rules.bpf.h"

#define AF_INET 2
#define AF_INET6 10
#define SOCK_STREAM 1
#define SOCK_TYPE_MASK 0xf
#define IPPROTO_TCP 6
#define IPPROTO_SMC 256
#define IPPROTO_MPTCP 262

/* Parts of the kernel's types, found by BTF when the program is loaded. */
struct nsproxy {
	struct net *net_ns;
} __attribute__((preserve_access_index));
struct task_struct {
	struct nsproxy *nsproxy;
} __attribute__((preserve_access_index));

/* The deepest cgroup of the task's that has a rule. */
static __always_inline struct rule *rule_of_cgroup(void)
{
	int level;

	for (level = MAX_DEPTH; level > 0; level--) {
		__u64 id = bpf_get_current_ancestor_cgroup_id(level);
		struct rule *r;

		if (!id)
			continue; /* the task's is not that deep */
		r = bpf_map_lookup_elem(&cgroups, &id);
		if (r)
			return r;
	}
	return NULL;
}

static __always_inline struct rule *rule_of_namespace(void)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct nsproxy *nsproxy = task->nsproxy;
	__u64 cookie;

	if (!nsproxy) /* the task is about to end */
		return NULL;
	cookie = nsproxy->net_ns->net_cookie;
	return bpf_map_lookup_elem(&namespaces, &cookie);
}

SEC("fmod_ret/update_socket_protocol")
int BPF_PROG(choose_protocol, int family, int type, int protocol, int before)
{
	struct rule *r;

	if (before || (family != AF_INET && family != AF_INET6) || (type & SOCK_TYPE_MASK) != SOCK_STREAM)
		return before;
	/* Go programs listen with MPTCP unless told otherwise. */
	if (protocol != 0 && protocol != IPPROTO_TCP && protocol != IPPROTO_MPTCP)
		return before;
	r = rule_of_cgroup();
	if (!r)
		r = rule_of_namespace();
	if (!r || r->choice != SMC)
		return before;
	__sync_fetch_and_add(&r->sockets, 1);
	return IPPROTO_SMC;
}

char _license[] SEC("license") = "Dual BSD/GPL";

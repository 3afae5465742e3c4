// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)

/*
 * Who is chosen, by network namespace and by cgroup: what the programs here have together. The Go side knows struct
 * rule and enum choice too.
 */

#ifndef RULES_H
#define RULES_H

#define MAX_RULES 4096 /* of a kind: more than a node has pods */
#define MAX_DEPTH 12 /* of cgroups: kubelet's are at most 6 deep */

/* A part of the kernel's type, found by BTF when a program is loaded. */
struct net {
	__u64 net_cookie;
} __attribute__((preserve_access_index));

enum choice {
	NOT_SMC = 1, /* leave this one alone, whatever is said above it */
	SMC = 2,
};

struct rule {
	__u32 choice;
	__u32 pad;
	__u64 sockets; /* that were made SMC by this rule */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_RULES);
	__type(key, __u64); /* cookie */
	__type(value, struct rule);
} namespaces SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, MAX_RULES);
	__type(key, __u64); /* ID */
	__type(value, struct rule);
} cgroups SEC(".maps");

#endif

/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What Go cannot do well with libibverbs: its data path is inline functions
 * over linked lists and unions. Here are flat work requests and completions in
 * C memory, and one function that posts or polls a whole batch of them.
 */
#ifndef KUBE_SMCR_VERBS_SHIM_H
#define KUBE_SMCR_VERBS_SHIM_H

#include <arpa/inet.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/verbs.h>

/* kv_wr is a work request; its SGEs follow those of the one before it. */
struct kv_wr {
	uint64_t id;
	uint64_t remote_addr;
	uint32_t rkey;
	uint32_t imm; /* host order */
	uint32_t op;
	uint32_t flags;
	uint32_t nsge;
	uint32_t reserved;
};

/* kv_wc is a work completion. */
struct kv_wc {
	uint64_t id;
	uint32_t status;
	uint32_t op;
	uint32_t bytes;
	uint32_t imm; /* host order */
	uint32_t qpn;
	uint32_t src_qp;
	uint32_t vendor;
	uint32_t flags;
};

/* kv_qp is a queue pair with its staging memory: for a batch of work requests
 * what Go fills in and what libibverbs takes. */
struct kv_qp {
	struct ibv_qp *qp;
	struct kv_wr *wr;
	struct ibv_sge *sge;
	uint8_t *in; /* inline payloads */
	struct ibv_send_wr *send;
	struct ibv_recv_wr *recv;
};

/* kv_cq is a completion queue with the completions of one poll. */
struct kv_cq {
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel;
	struct kv_wc *wc;
	struct ibv_wc *raw;
	int armed; /* by kv_again */
};

/* kv_async is an asynchronous event. */
struct kv_async {
	uint32_t type;
	uint32_t port;
	uint32_t qpn;
	uint32_t reserved;
	uint64_t cq; /* the context that its queue was made with */
};

/* kv_path is where a queue pair goes to RTR. */
struct kv_path {
	uint8_t dgid[16];
	uint32_t flow_label;
	uint8_t sgid_index;
	uint8_t hop_limit;
	uint8_t traffic_class;
	uint8_t port;
};

static inline void kv_qp_free(struct kv_qp *q)
{
	if (!q)
		return;
	free(q->wr);
	free(q->sge);
	free(q->in);
	free(q->send);
	free(q->recv);
	free(q);
}

/* kv_qp_new makes staging memory for batches of nwr work requests. */
static inline struct kv_qp *kv_qp_new(size_t nwr, size_t nsge, size_t inline_bytes)
{
	struct kv_qp *q = calloc(1, sizeof(*q));

	if (!q)
		return NULL;
	q->wr = calloc(nwr, sizeof(*q->wr));
	q->sge = calloc(nwr * nsge, sizeof(*q->sge));
	q->in = calloc(nwr, inline_bytes ? inline_bytes : 1);
	q->send = calloc(nwr, sizeof(*q->send));
	q->recv = calloc(nwr, sizeof(*q->recv));
	if (!q->wr || !q->sge || !q->in || !q->send || !q->recv) {
		kv_qp_free(q);
		return NULL;
	}
	return q;
}

/* kv_result packs how many work requests were taken, and the error. */
static inline uint64_t kv_result(uint32_t taken, int err)
{
	if (err < 0)
		err = -err; /* some drivers do not keep to the sign */
	return (uint64_t)taken << 32 | (uint32_t)err;
}

static inline uint64_t kv_post_send(uintptr_t handle, uint32_t n)
{
	struct kv_qp *q = (struct kv_qp *)handle;
	struct ibv_send_wr *bad = NULL;
	struct ibv_sge *sge = q->sge;
	uint32_t i;
	int err;

	for (i = 0; i < n; i++) {
		struct ibv_send_wr *to = &q->send[i];
		const struct kv_wr *w = &q->wr[i];

		to->wr_id = w->id;
		to->next = i + 1 < n ? to + 1 : NULL;
		to->sg_list = sge;
		to->num_sge = w->nsge;
		to->opcode = w->op;
		to->send_flags = w->flags;
		to->imm_data = htonl(w->imm);
		to->wr.rdma.remote_addr = w->remote_addr;
		to->wr.rdma.rkey = w->rkey;
		sge += w->nsge;
	}
	err = ibv_post_send(q->qp, q->send, &bad);
	return kv_result(err && bad ? bad - q->send : err ? 0 : n, err);
}

static inline uint64_t kv_post_recv(uintptr_t handle, uint32_t n)
{
	struct kv_qp *q = (struct kv_qp *)handle;
	struct ibv_recv_wr *bad = NULL;
	struct ibv_sge *sge = q->sge;
	uint32_t i;
	int err;

	for (i = 0; i < n; i++) {
		struct ibv_recv_wr *to = &q->recv[i];
		const struct kv_wr *w = &q->wr[i];

		to->wr_id = w->id;
		to->next = i + 1 < n ? to + 1 : NULL;
		to->sg_list = sge;
		to->num_sge = w->nsge;
		sge += w->nsge;
	}
	err = ibv_post_recv(q->qp, q->recv, &bad);
	return kv_result(err && bad ? bad - q->recv : err ? 0 : n, err);
}

static inline void kv_cq_free(struct kv_cq *c)
{
	if (!c)
		return;
	free(c->wc);
	free(c->raw);
	free(c);
}

static inline struct kv_cq *kv_cq_new(size_t n)
{
	struct kv_cq *c = calloc(1, sizeof(*c));

	if (!c)
		return NULL;
	c->wc = calloc(n, sizeof(*c->wc));
	c->raw = calloc(n, sizeof(*c->raw));
	if (!c->wc || !c->raw) {
		kv_cq_free(c);
		return NULL;
	}
	return c;
}

/* kv_poll takes up to n completions to c->wc; negative: the queue is broken. */
static inline int kv_poll(uintptr_t handle, int n)
{
	struct kv_cq *c = (struct kv_cq *)handle;
	int i, got = ibv_poll_cq(c->cq, n, c->raw);

	for (i = 0; i < got; i++) {
		const struct ibv_wc *w = &c->raw[i];
		struct kv_wc *to = &c->wc[i];

		to->id = w->wr_id;
		to->status = w->status;
		to->op = w->opcode;
		to->bytes = w->byte_len;
		to->imm = ntohl(w->imm_data);
		to->qpn = w->qp_num;
		to->src_qp = w->src_qp;
		to->vendor = w->vendor_err;
		to->flags = w->wc_flags;
	}
	return got;
}

static inline int kv_arm(uintptr_t handle, int solicited)
{
	return ibv_req_notify_cq(((struct kv_cq *)handle)->cq, solicited);
}

/* kv_comp_event takes one completion event: 0, or the error. */
static inline int kv_comp_event(struct kv_cq *c)
{
	struct ibv_cq *cq;
	void *user;

	if (ibv_get_cq_event(c->channel, &cq, &user))
		return errno ? errno : EIO;
	ibv_ack_cq_events(cq, 1);
	return 0;
}

/* kv_again makes a queue call again after what it called for was dealt with:
 * it takes that event, if there is one, then completions, and arms the queue if
 * there are none. It polls once more then: one may have come before. Returns how
 * many completions are in c->wc; negative: -errno. */
static inline int kv_again(uintptr_t handle, int event, int solicited, int n)
{
	struct kv_cq *c = (struct kv_cq *)handle;
	int err, got;

	c->armed = 0;
	if (event)
		kv_comp_event(c); /* of a device that is gone there is none */
	got = kv_poll(handle, n);
	if (got)
		return got < 0 ? -EIO : got;
	err = kv_arm(handle, solicited);
	if (err)
		return err < 0 ? err : -err;
	c->armed = 1;
	got = kv_poll(handle, n);
	return got < 0 ? -EIO : got;
}

static inline struct ibv_cq *kv_create_cq(struct ibv_context *ctx, int depth, uint64_t id, struct ibv_comp_channel *ch,
					  int vector)
{
	return ibv_create_cq(ctx, depth, (void *)(uintptr_t)id, ch, vector);
}

/* kv_async_event takes one asynchronous event and acknowledges it: what it
 * names can be destroyed. 0, or the error. */
static inline int kv_async_event(struct ibv_context *ctx, struct kv_async *out)
{
	struct ibv_async_event ev;

	memset(&ev, 0, sizeof(ev));
	if (ibv_get_async_event(ctx, &ev))
		return errno ? errno : EIO;
	memset(out, 0, sizeof(*out));
	out->type = ev.event_type;
	switch (ev.event_type) {
	case IBV_EVENT_CQ_ERR:
		out->cq = (uintptr_t)ev.element.cq->cq_context;
		break;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		out->qpn = ev.element.qp->qp_num;
		break;
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
	case IBV_EVENT_GID_CHANGE:
		out->port = ev.element.port_num;
		break;
	default:
		break;
	}
	ibv_ack_async_event(&ev);
	return 0;
}

/* kv_open opens the device of a node, as in "uverbs0"; NULL with errno. */
static inline struct ibv_context *kv_open(const char *node)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx = NULL;
	int i, err = ENODEV;

	if (!list)
		return NULL;
	for (i = 0; list[i]; i++) {
		if (strcmp(list[i]->dev_name, node))
			continue;
		errno = 0;
		ctx = ibv_open_device(list[i]);
		err = errno ? errno : EIO;
		break;
	}
	ibv_free_device_list(list);
	errno = ctx ? 0 : err;
	return ctx;
}

static inline int kv_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *out)
{
	memset(out, 0, sizeof(*out));
	return ibv_query_port(ctx, port, out);
}

static inline ssize_t kv_query_gids(struct ibv_context *ctx, struct ibv_gid_entry *out, size_t n)
{
	return ibv_query_gid_table(ctx, out, n, 0);
}

static inline struct ibv_mr *kv_reg_mr(struct ibv_pd *pd, uint64_t addr, size_t n, uint64_t iova, int access)
{
	return ibv_reg_mr_iova(pd, (void *)(uintptr_t)addr, n, iova, access);
}

static inline struct ibv_qp *kv_create_qp(struct ibv_pd *pd, struct ibv_cq *send, struct ibv_cq *recv,
					  struct ibv_qp_cap *cap)
{
	struct ibv_qp_init_attr init;

	memset(&init, 0, sizeof(init));
	init.send_cq = send;
	init.recv_cq = recv;
	init.cap = *cap;
	init.qp_type = IBV_QPT_RC;
	return ibv_create_qp(pd, &init);
}

static inline void kv_ah(struct ibv_ah_attr *a, const struct kv_path *path)
{
	a->is_global = 1;
	a->port_num = path->port;
	a->sl = path->traffic_class >> 5;
	memcpy(a->grh.dgid.raw, path->dgid, sizeof(path->dgid));
	a->grh.flow_label = path->flow_label;
	a->grh.sgid_index = path->sgid_index;
	a->grh.hop_limit = path->hop_limit;
	a->grh.traffic_class = path->traffic_class;
}

/* kv_resolve makes an address handle, for which the MAC address of the next hop
 * is asked for, and gives it back. */
static inline int kv_resolve(struct ibv_context *ctx, const struct kv_path *path)
{
	struct ibv_ah_attr a;
	struct ibv_pd *pd;
	struct ibv_ah *ah;
	int err = 0;

	pd = ibv_alloc_pd(ctx);
	if (!pd)
		return errno ? errno : EIO;
	memset(&a, 0, sizeof(a));
	kv_ah(&a, path);
	errno = 0;
	ah = ibv_create_ah(pd, &a);
	if (ah)
		ibv_destroy_ah(ah);
	else
		err = errno ? errno : EIO;
	ibv_dealloc_pd(pd);
	return err;
}

/* kv_to_state is for the states without attributes. */
static inline int kv_to_state(struct ibv_qp *qp, int state)
{
	struct ibv_qp_attr a;

	memset(&a, 0, sizeof(a));
	a.qp_state = state;
	return ibv_modify_qp(qp, &a, IBV_QP_STATE);
}

static inline int kv_to_init(struct ibv_qp *qp, uint8_t port, int access)
{
	struct ibv_qp_attr a;

	memset(&a, 0, sizeof(a));
	a.qp_state = IBV_QPS_INIT;
	a.port_num = port;
	a.qp_access_flags = access;
	return ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static inline int kv_to_rtr(struct ibv_qp *qp, const struct kv_path *path, uint32_t dest_qpn, uint32_t psn,
			    int mtu, uint8_t rnr_timer, uint8_t reads)
{
	struct ibv_qp_attr a;

	memset(&a, 0, sizeof(a));
	a.qp_state = IBV_QPS_RTR;
	a.path_mtu = mtu;
	a.dest_qp_num = dest_qpn;
	a.rq_psn = psn;
	a.max_dest_rd_atomic = reads;
	a.min_rnr_timer = rnr_timer;
	kv_ah(&a.ah_attr, path);
	return ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

static inline int kv_to_rts(struct ibv_qp *qp, uint32_t psn, uint8_t timeout, uint8_t retries, uint8_t rnr_retries,
			    uint8_t reads)
{
	struct ibv_qp_attr a;

	memset(&a, 0, sizeof(a));
	a.qp_state = IBV_QPS_RTS;
	a.sq_psn = psn;
	a.timeout = timeout;
	a.retry_cnt = retries;
	a.rnr_retry = rnr_retries;
	a.max_rd_atomic = reads;
	return ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					     IBV_QP_MAX_QP_RD_ATOMIC);
}

/* kv_query_state returns the state, negative: the error. */
static inline int kv_query_state(struct ibv_qp *qp)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr a;
	int err = ibv_query_qp(qp, &a, IBV_QP_STATE, &init);

	return err ? -err : (int)a.qp_state;
}

/* kv_query_rq_psn returns the PSN that the responder expects next, negative: the
 * error. */
static inline int64_t kv_query_rq_psn(struct ibv_qp *qp)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr a;
	int err = ibv_query_qp(qp, &a, IBV_QP_RQ_PSN, &init);

	return err ? -(int64_t)err : (int64_t)a.rq_psn;
}

#endif

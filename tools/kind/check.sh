#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the chart on the cluster that kubectl talks to, lets redis pods of two
# nodes talk, checks that their connections are on SMC-R, and uninstalls.
#
#   IMAGE=REPOSITORY:TAG tools/kind/check.sh
#
# PULL_POLICY (Never), REDIS_IMAGE and OUT (out/kind, for logs) may be set, too.
# Any cluster with two schedulable nodes will do.
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${IMAGE:?set it to the image with the programs, REPOSITORY:TAG}"
PULL_POLICY=${PULL_POLICY:-Never}
REDIS_IMAGE=${REDIS_IMAGE:-docker.io/library/redis:8}
OUT=${OUT:-out/kind}
ns=kube-smcr

logs() {
	mkdir -p "$OUT"
	kubectl get nodes,pods -A -o wide >"$OUT/objects.txt" 2>&1 || true
	kubectl get smcrnodes,smcrlinks -o yaml >"$OUT/smcr.yaml" 2>&1 || true
	kubectl get events -A --sort-by=.lastTimestamp >"$OUT/events.txt" 2>&1 || true
	kubectl -n $ns describe pods >"$OUT/pods.txt" 2>&1 || true
	kubectl -n $ns logs -l app.kubernetes.io/component=agent --prefix --tail=-1 >"$OUT/agents.log" 2>&1 || true
	kubectl -n $ns logs -l app.kubernetes.io/component=controller --prefix --tail=-1 >"$OUT/controllers.log" 2>&1 || true
}
fail() {
	echo "check: $*" >&2
	logs
	echo "check: logs are in $OUT" >&2
	exit 1
}
# until_true SECONDS WHAT COMMAND...: asks again until COMMAND succeeds.
until_true() {
	local deadline=$((SECONDS + $1)) what=$2
	shift 2
	until "$@" >/dev/null 2>&1; do
		[ $SECONDS -lt $deadline ] || fail "waited in vain for $what"
		sleep 1
	done
}

echo "== install"
kubectl create namespace $ns --dry-run=client -o yaml | kubectl apply -f - >/dev/null
kubectl label --overwrite namespace $ns pod-security.kubernetes.io/enforce=privileged >/dev/null
# Small nodes: an update has two agents on each.
helm upgrade --install kube-smcr charts/kube-smcr --namespace $ns --wait --timeout 3m \
	--set image.repository="${IMAGE%:*}",image.tag="${IMAGE##*:}",image.pullPolicy="$PULL_POLICY" \
	--set agent.resources.cpu=200m,agent.resources.memory=640Mi,agent.budgets.node.memory=256MiB,agent.budgets.node.sockets=128MiB,agent.budgets.pod.memory=128MiB ||
	fail "helm install did not succeed"
count() {
	local list
	list=$(kubectl get "$1" -o name) && grep -c . <<<"$list"
}
every_node() {
	local nodes agents
	nodes=$(count nodes) && agents=$(count smcrnodes) && [ "$agents" -eq "$nodes" ]
}
until_true 60 "an SMCRNode of each node" every_node
until_true 60 "every node's agent" kubectl wait --for=condition=Ready smcrnodes --all --timeout=1s
kubectl get smcrnodes

echo "== redis on two nodes"
sed "s|REDIS_IMAGE|$REDIS_IMAGE|; s|PULL_POLICY|${REDIS_PULL_POLICY:-IfNotPresent}|" tools/kind/redis.yaml | kubectl apply -f - >/dev/null
kubectl -n smcr-check wait --for=condition=Ready pod --all --timeout=2m >/dev/null || fail "the pods do not start"
status() { kubectl -n smcr-check get pod "$1" -o jsonpath='{.metadata.annotations.smcr\.io/status}'; }
enabled() { [ "$(status redis)" = Enabled ] && [ "$(status client)" = Enabled ]; }
until_true 30 "smcr.io/status: Enabled on both pods" enabled
# By address: some clusters for tests have no DNS.
redis=$(kubectl -n smcr-check get service redis -o jsonpath='{.spec.clusterIP}')
kubectl -n smcr-check exec client -- redis-benchmark -h "$redis" -n 20000 -c 8 -t set,get -q ||
	fail "redis does not answer"

echo "== link groups"
two_links() { [ "$(kubectl get smcrlinks --no-headers 2>/dev/null | wc -l)" -ge 2 ]; }
until_true 30 "an SMCRLink of each side" two_links
kubectl get smcrlinks
on_smcr=0
for pod in $(kubectl -n $ns get pods -l app.kubernetes.io/component=agent -o name); do
	kubectl -n $ns exec "$pod" -- smcrctl status
	total=$(kubectl -n $ns exec "$pod" -- smcrctl status -o json | tr -d ' \n' | sed -n 's/.*"totalSMCR":\([0-9]*\).*/\1/p')
	on_smcr=$((on_smcr + ${total:-0}))
done
[ "$on_smcr" -gt 0 ] || fail "no connection was on SMC-R"

echo "== uninstall"
helm uninstall kube-smcr --namespace $ns --wait --timeout 4m || fail "helm uninstall did not succeed"
left=$(kubectl get smcrnodes,smcrlinks --no-headers) || fail "kubectl does not say which objects are left"
[ -z "$left" ] || fail "objects are left: $left"
kubectl -n smcr-check exec client -- redis-cli -h "$redis" ping ||
	fail "redis does not answer once kube-smcr is gone"
left=$(status client) || fail "kubectl does not say what the pod has"
[ -z "$left" ] || fail "the pod still has smcr.io/status: $left"
kubectl delete namespace smcr-check $ns --wait=false >/dev/null
echo "check: ok"

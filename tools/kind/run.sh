#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the image with docker, starts a cluster with kind, and runs check.sh on
# it: software RoCE between the containers that are the nodes. Needs docker,
# kubectl and helm. KEEP=1 leaves the cluster.
set -euo pipefail
cd "$(dirname "$0")/../.."

kind_version=v0.33.0
name=kube-smcr
image=kube-smcr.local/kube-smcr:kind
redis=docker.io/library/redis:8

command -v kind >/dev/null || go install "sigs.k8s.io/kind@$kind_version"
PATH=$PATH:$(go env GOPATH)/bin

# The agents need these of the host's kernel; containers cannot load them.
for module in nf_tables nft_chain_nat nft_redir nft_tproxy nft_socket nfnetlink_queue nft_queue; do
	sudo modprobe "$module" || echo "run: no module $module; it may be built in"
done

docker build -t "$image" .
docker pull -q "$redis"
if [ -z "${KEEP:-}" ]; then trap 'kind delete cluster --name "$name"' EXIT; fi
kind create cluster --name "$name" --config tools/kind/cluster.yaml --wait 3m
kind load docker-image --name "$name" "$image" "$redis"
IMAGE=$image REDIS_IMAGE=$redis tools/kind/check.sh

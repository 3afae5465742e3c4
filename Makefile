# SPDX-License-Identifier: Apache-2.0
# kube-smcr: `make help` lists the targets.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS   += --no-builtin-rules

# A shell started by sudo often lacks Go's directory in PATH.
export PATH := $(PATH):/usr/local/go/bin:/usr/sbin:/sbin

# What is compiled does not name the checkout's directory, so that one elsewhere
# finds it in the build cache.
export GOFLAGS := $(strip $(filter-out -trimpath,$(GOFLAGS)) -trimpath)

GO       ?= go
GOTOOL   := $(GO) tool -modfile=tools/pinned/go.mod
FUZZTIME ?= 60s
SIMCOUNT ?= 200
SIM_SCHEDULES ?= 100000
PKG      ?= ./...
ARGS     ?=

# Root has everything the tests ask for, so a skipped test is a failure there.
ifeq ($(shell id -u),0)
export KUBE_SMCR_CI_REQUIRE ?= all
endif

# Directory and binary names differ only for the CNI plugin: its file name is
# what a CNI configuration calls it.
binary   = $(if $(filter cni-plugin,$(1)),smcr-cni,$(1))
# Go reads the version from git; a checkout that git does not trust has none.
BUILDVCS := $(shell git status >/dev/null 2>&1 && echo true || echo false)
COMMANDS := $(sort $(notdir $(patsubst %/main.go,%,$(wildcard cmd/*/main.go))))

##@ General

.PHONY: help
help: ## Show this list.
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@ / {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  %-17s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: deps
deps: ## Install the distribution packages that are missing (needs root if any is).
	@tools/deps.sh runtime

.PHONY: clean
clean: ## Remove what the other targets made.
	rm -rf bin out

##@ Build

.PHONY: build
build: $(addprefix build-,$(COMMANDS)) ## Build the programs into bin/ (VERBS=0: node-agent without hardware verbs).

# node-agent uses libibverbs, and so C, where a C compiler and the headers are:
# it is linked dynamically then. All others, and without these node-agent too,
# are static; node-agent --version says which it is.
CC    ?= cc
VERBS ?= $(shell echo '\#include <infiniband/verbs.h>' | $(CC) -E - >/dev/null 2>&1 && echo 1 || echo 0)

.PHONY: build-%
build-%:
	CGO_ENABLED=$(if $(filter node-agent,$*),$(VERBS),0) $(GO) build -trimpath -buildvcs=$(BUILDVCS) -o bin/$(call binary,$*) ./cmd/$*

.PHONY: generate
generate: ## Rebuild generated files (eBPF objects; needs clang).
	@tools/deps.sh generate
	$(GO) generate $(PKG)

##@ Test

.PHONY: test
test: deps cluster-tools $(if $(filter ./... ./test/vm% ./test/cluster/%,$(PKG)),vm-image) ## Run all tests, with the race detector where it can see something (PKG=./pkg/smcr/... ARGS=-run=X).
	$(call tested,$(pure),$(if $(filter -vet=off,$(TESTER)),-vet=off) -timeout=$(PURE_TIMEOUT),$(GO) test)
	$(call tested,$(judges))
	$(call tested,$(together),-race -p=$(TEST_JOBS) -parallel=$(TEST_JOBS))
	$(call tested,$(apart),-p=$(APART_JOBS))

# PURE packages have no goroutines, and the simulator's share nothing but a
# counter: the race detector sees nothing there, and takes ten times the time. They wait for nothing but processors,
# which in CI others have first: PURE_TIMEOUT is theirs.
pure-pattern := /(api/v1alpha1|internal/config|pkg/rdma(/internal/(ssp|wq)|/iwarp|/rocev2|/vitcp)?|pkg/sdp/(bsdh|portmap|socket)|pkg/smcr/(cdc|clc|linkgroup|llc|smcrtest))$$
# Rules of the repository, the chart and the CRDs are judged by the tests themselves, by
# helm and by an API server: no goroutine of this project runs in these packages.
judge-pattern := /(kube-smcr|config/crd|test/chart)$$
# What starts a cluster, guests, or programs under load is tested after the rest, and
# without the race detector, which the programs under test do not have either. One at a time:
# they bound how long something takes, and emulated guests want the processors.
apart-pattern := /test/(cluster(/lab|/rdma)?$$|netns/(apps|twonodes)$$|scale$$|vm/)
APART_JOBS ?= 1
# These take longest. They go first, so that nothing else waits for them.
long-pattern := /(internal/(agent|controller|kube(/report)?|linux)|pkg/(rdma/soft(iwarp|vi)?|sdp|smcr)|test/cluster(/rdma)?|test/vm/(agent|kernel|links|vf))$$

# Most other packages wait for kernels, timers and API servers most of the time,
# so twice as many run at a time as there are processors, and so do the tests of a
# package that are marked as parallel.
TEST_JOBS ?= $(shell echo $$((2 * $$(nproc))))
# The cluster takes seven minutes of a package's time, beside guests on a slow
# machine two to three times that.
TEST_TIMEOUT ?= 30m
PURE_TIMEOUT ?= $(TEST_TIMEOUT)
# Go remembers what a test said, "(cached)", until something changes that the test looked at; tools/inputs tells it
# what tests build and run. FRESH=1 runs all of them.
FRESH ?=
# What runs tests. For CI that is tools/again: a test that fails runs once more, alone. Those of PURE packages look at
# no clock, and one that fails has found something.
TESTER ?= $(GO) test
# A process with the race detector waits for a second when it ends, unless told.
export GORACE ?= atexit_sleep_ms=0

pure     = grep -E '$(pure-pattern)'
judges   = grep -E '$(judge-pattern)'
norace   = grep -E '$(pure-pattern)|$(judge-pattern)'
longest  = sed -E 's!.*$(long-pattern)! &!' | LC_ALL=C sort
apart    = grep -E '$(apart-pattern)' | $(longest)
together = grep -vE '$(pure-pattern)|$(judge-pattern)|$(apart-pattern)' | $(longest)
# tested tests the packages that a filter leaves, if there are any, by TESTER or what the third argument says.
# No PKG at all is of a command that failed.
tested = $(if $(strip $(PKG)),,$(error PKG names no package))@all=$$($(GO) list $(PKG)); pkgs=$$(echo "$$all" | { $(1) || true; }); \
	[ -z "$$pkgs" ] || { inputs=$$($(GO) run ./tools/inputs) && echo "$(or $(3),$(TESTER)) $(2)" && \
		env $$inputs $(or $(3),$(TESTER)) -timeout=$(TEST_TIMEOUT) $(2) $(if $(FRESH),-count=1) $(ARGS) $$pkgs; }

.PHONY: test-later
test-later: # Run the tests again that AGAIN_LATER had wait in FILE.
	$(GO) run ./tools/again -later=$(FILE)

.PHONY: list-norace
list-norace:
	@$(GO) list ./... | $(norace)

# Each attack that is known is a test of this name, in the package that it is
# against, and one of make test, too; there the race detector watches, and what is
# said of times and memory is not judged. So are the others, of held SYNs, whose
# times are promised. -long plays random mixes for an hour.
attack-tests := ^(TestAttack_.*|TestHold_(killedOrStopped|givesUp|sameNode|simultaneousRequired))$$
ATTACK_LONG  ?= 1h
attack-packages = $$(grep -rlE '^func TestAttack_' --include=*_test.go . | xargs -n1 dirname | sort -u)

.PHONY: test-attack
test-attack: deps ## Run the attacks that are known, and what else is judged by time, without the race detector (ARGS=-long: random mixes of them for an hour).
	$(GO) test -count=1 -timeout=$(TEST_TIMEOUT) -run='$(attack-tests)' $(filter-out -long,$(ARGS)) $(attack-packages)
	$(if $(filter -long,$(ARGS)),$(GO) test -count=1 -v -timeout=3h -run='^TestAttack_anything$$' $(filter-out -long,$(ARGS)) ./internal/agent -attack.for=$(ATTACK_LONG))

.PHONY: test-apps
test-apps: deps ## Run redis', memcached's and curl's own tests against pods, opted in and not, and compare (ARGS=-long: all of them, for two hours).
	$(TESTER) -count=1 -v -timeout=6h ./test/netns/apps $(patsubst -long,-apps.long,$(ARGS))

.PHONY: test-cluster
test-cluster: deps cluster-tools ## Test on a real two-node Kubernetes from end to end (ARGS=-run=TestCluster/optIn).
	$(GO) test -count=1 -v -timeout=$(TEST_TIMEOUT) $(ARGS) ./test/cluster

.PHONY: test-cluster-rdma
test-cluster-rdma: deps cluster-tools vm-image ## Test on a Kubernetes two of whose nodes are guests with rxe, in some three quarters of an hour (ARGS=-run=TestRDMA/links).
	$(GO) test -count=1 -v -timeout=100m $(ARGS) ./test/cluster/rdma

.PHONY: test-vm
test-vm: deps vm-image ## Test on rxe and the kernel's SMC-R, in guests (PKG=./test/vm/kernel ARGS=-run=X).
	$(GO) test -count=1 -p=$(APART_JOBS) -timeout=$(TEST_TIMEOUT) $(ARGS) $(if $(filter ./...,$(PKG)),./test/vm/...,$(PKG))

.PHONY: test-vf
test-vf: deps vm-image ## Test the wiring of RoCE VFs into pods, in guests with emulated SR-IOV NICs (ARGS=-run=TestVF/churn).
	$(GO) test -count=1 -v -timeout=$(TEST_TIMEOUT) $(ARGS) ./test/vm/vf

.PHONY: vm-image
vm-image: deps ## Build what the guests boot, once; print where it is.
	@$(GO) run ./tools/vm image

.PHONY: test-race
test-race: deps cluster-tools ## Look for rare races: every test five times, in random order.
	$(call tested,$(together),-race -count=5 -shuffle=on -timeout=45m)

.PHONY: sim
sim: ## Play SIM_SCHEDULES (100000) random schedules of SMC-R and of SDP, a tenth as many of iWARP and VI/TCP, and repeat the other simulations (SIMCOUNT=200).
	SIM_SCHEDULES=$(SIM_SCHEDULES) $(GO) test -count=1 -v -timeout=12h -run=TestSimulation ./pkg/smcr/smcrtest -sim.base=0 $(ARGS)
	$(GO) test -count=1 -v -timeout=12h -run='^TestSim' ./pkg/rdma/iwarp ./pkg/rdma/vitcp -sim.base=0 -sim.schedules=$$(($(SIM_SCHEDULES) / 10)) $(ARGS)
	SIM_SCHEDULES=$(SIM_SCHEDULES) $(GO) test -count=1 -timeout=12h -run='TestSim$$' ./pkg/sdp/socket
	$(GO) test -short -count=$(SIMCOUNT) -timeout=2h -run='Sim|Model|Random|Fault|Fabric' $(ARGS) $(PKG)

.PHONY: fuzz
fuzz: ## Run every fuzz target for FUZZTIME (60s), or those that changed for FUZZTOTAL seconds in all.
	@GO='$(GO)' FUZZTOTAL='$(FUZZTOTAL)' FRESH='$(FRESH)' tools/fuzz.sh $(FUZZTIME)

.PHONY: bench
bench: deps build ## Compare with TCP and with haproxy; table and JSON.
	$(GO) run ./bench/namespaces $(ARGS)

.PHONY: bench-vm
bench-vm: deps vm-image ## Compare with raw verbs, the kernel's SMC-R, rsockets and TCP in guests; table and JSON (ARGS='-groups iwarp': iWARP with siw; '-groups sdp-roce': SDP with READs and rsockets; '-groups transparent': unmodified programs on the kernel's SMC-R, agents and relays; '-groups receivers': a node that receives with one and two processors).
	@mkdir -p out
	$(GO) run ./bench/guests -json-file out/bench-vm.json $(ARGS)

.PHONY: demo-failover
demo-failover: deps build ## Cut links under running applications and print how long they stall.
	$(GO) run ./demo/namespaces --failover $(ARGS)

.PHONY: demo
demo: deps build ## Carry nginx, redis and iperf3 between two pods over SMC-R and show it.
	$(GO) run ./demo/namespaces $(ARGS)

.PHONY: demo-iwarp
demo-iwarp: deps ## Move GiBs by RDMA between two programs without rights, over a TCP connection that began as text (ARGS='-mib 64'; ARGS=-siw: one on Linux' siw, in a guest).
	$(GO) run ./demo/upgrade $(ARGS)

.PHONY: demo-sdp
demo-sdp: deps ## Move a file between two programs without rights by TCP, and over the same kind of connection by SDP, copied and not (ARGS='-mib 64').
	$(GO) run ./demo/sdp $(ARGS)

.PHONY: demo-vf
demo-vf: deps vm-image ## Give pods RoCE VFs in guests and show it (ARGS=--times compares ADD and DEL with the reference plugin).
	$(GO) run ./demo/vf $(ARGS)

##@ Cluster

.PHONY: demo-k8s
demo-k8s: deps cluster-tools ## Show on a real Kubernetes what its users see (KEEP=1 leaves it running).
	$(GO) run ./demo/k8s $(if $(KEEP),--keep) $(ARGS)

.PHONY: demo-rdma
demo-rdma: deps cluster-tools vm-image ## Show the same on nodes with RDMA devices, emulated, in some three minutes (KEEP=1 leaves it running).
	$(GO) run ./demo/rnics $(if $(KEEP),--keep) $(ARGS)

.PHONY: demo-vm-kernel
demo-vm-kernel: deps cluster-tools vm-image ## Show the kernel's own SMC-R as datapath of pods there: TCP, agents and kernel with redis, agents killed, a policy that revokes, a pod in its node's network (KEEP=1 leaves it running).
	$(GO) run ./demo/kernel $(if $(KEEP),--keep) $(ARGS)

.PHONY: cluster-tools
cluster-tools: deps ## Build Kubernetes, helm and containerd for the tests, once; print where they are.
	@$(GO) run ./tools/cluster tools

.PHONY: image
image: ## Pack the image that the chart installs, without docker, as a file for kind, minikube, k3s or any containerd.
	@$(GO) run ./tools/cluster image --chart

.PHONY: cluster-up
cluster-up: deps ## Start a real two-node Kubernetes on this machine and say how to use it (ARGS=--rdma: nodes with RDMA devices).
	@$(GO) run ./tools/cluster up --logs out/cluster $(ARGS)

.PHONY: cluster-down
cluster-down: ## End that cluster, or what is left of it, and remove everything.
	@$(GO) run ./tools/cluster down $(ARGS)

##@ Check

CHECK_BASE ?= main

.PHONY: check
check: deps ## In two minutes: lint and test what differs from main, and what imports it, without clusters and guests (CHECK_BASE=main ARGS=-for=5m).
	@$(GO) run ./tools/check -base=$(CHECK_BASE) $(ARGS)

# The linters follow the paths of cgo's output, which the build cache has from any
# checkout, also from one that is gone.
.PHONY: lint
lint: export GOFLAGS =
lint: ## Run golangci-lint, the import rules included, and actionlint.
	@tools/deps.sh compile
	$(GOTOOL) golangci-lint run $(ARGS)
	$(GO) tool -modfile=tools/pinned/actionlint/go.mod actionlint

.PHONY: vuln
vuln: ## Look for known vulnerabilities that the code reaches; fails where no database can be read (VULNDB=file:///DIR).
	@GO='$(GO)' tools/vuln.sh

.PHONY: fmt
fmt: ## Format the code as lint wants it (gofumpt, goimports).
	$(GOTOOL) golangci-lint fmt

.PHONY: rfcmatrix
rfcmatrix: ## Write docs/rfc7609.md, docs/iwarp.md, docs/ssp.md, docs/vitcp.md, docs/portmap.md and docs/sdp.md: each rule, its code and test (ARGS=-prove).
	$(GO) run ./tools/rfcmatrix $(ARGS)

.PHONY: verify
verify: ## Check modules, formatting, and that generated files are up to date.
	@tools/verify.sh

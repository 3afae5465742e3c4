# SPDX-License-Identifier: Apache-2.0
# kube-smcr: `make help` lists the targets.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS   += --no-builtin-rules

# A shell started by sudo often lacks Go's directory in PATH.
export PATH := $(PATH):/usr/local/go/bin:/usr/sbin:/sbin

GO       ?= go
GOTOOL   := $(GO) tool -modfile=hack/tools/go.mod
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
		/^[a-z-]+:.*## / {printf "  %-13s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: deps
deps: ## Install the distribution packages that are missing (needs root if any is).
	@hack/deps.sh runtime

.PHONY: clean
clean: ## Remove what the other targets made.
	rm -rf bin out

##@ Build

.PHONY: build
build: $(addprefix build-,$(COMMANDS)) ## Build static binaries into bin/.

.PHONY: build-%
build-%:
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=$(BUILDVCS) -o bin/$(call binary,$*) ./cmd/$*

.PHONY: generate
generate: ## Rebuild generated files (eBPF objects; needs clang).
	@hack/deps.sh generate
	$(GO) generate $(PKG)

##@ Test

.PHONY: test
test: deps ## Run all tests with the race detector (PKG=./pkg/smcr/... ARGS=-run=X).
	$(GO) test -race -timeout=15m $(ARGS) $(PKG)

.PHONY: test-race
test-race: deps ## Look for rare races: every test five times, in random order.
	$(GO) test -race -count=5 -shuffle=on -timeout=45m $(ARGS) $(PKG)

.PHONY: sim
sim: ## Play SIM_SCHEDULES (100000) random schedules of SMC-R, and repeat the other simulations (SIMCOUNT=200).
	SIM_SCHEDULES=$(SIM_SCHEDULES) $(GO) test -count=1 -v -timeout=12h -run=TestSimulation $(ARGS) ./pkg/smcr/smcrtest
	$(GO) test -short -count=$(SIMCOUNT) -timeout=2h -run='Sim|Model|Random|Fault|Fabric' $(ARGS) $(PKG)

.PHONY: fuzz
fuzz: ## Run every fuzz target for FUZZTIME (60s).
	@GO='$(GO)' hack/fuzz.sh $(FUZZTIME)

.PHONY: bench
bench: deps build ## Compare with TCP and with haproxy; table and JSON.
	$(GO) run ./hack/bench $(ARGS)

.PHONY: demo-failover
demo-failover: deps build ## Cut links under running applications and print how long they stall.
	$(GO) run ./hack/demo --failover $(ARGS)

.PHONY: demo
demo: deps build ## Carry nginx, redis and iperf3 between two pods over SMC-R and show it.
	$(GO) run ./hack/demo $(ARGS)

##@ Check

.PHONY: lint
lint: ## Run golangci-lint, the import rules included.
	$(GOTOOL) golangci-lint run $(ARGS)

.PHONY: fmt
fmt: ## Format the code as lint wants it (gofumpt, goimports).
	$(GOTOOL) golangci-lint fmt

.PHONY: rfcmatrix
rfcmatrix: ## Write docs/rfc7609.md: each rule of RFC 7609, its code and test (ARGS=-prove).
	$(GO) run ./hack/rfcmatrix $(ARGS)

.PHONY: verify
verify: ## Check modules, formatting, and that generated files are up to date.
	@hack/verify.sh

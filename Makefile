# The front door: one line a target; the work is done by `lockstep` and scripts/. `make help` lists them.
PYTHON ?= python3
CLUSTER ?= local
MODE ?= auto
JOB ?= demo
NODES ?= 2
BIN := .venv/bin
PYTEST := $(BIN)/pytest

.DEFAULT_GOAL := help
.PHONY: help setup quickstart list-clusters deploy-cluster deploy-cluster-dry-run status-cluster clean-cluster logs cluster-up cluster-down test test-unit test-train test-faults test-cluster drills lint format manifests lock

##@ Start
help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready ## make .venv (packages are cached outside the checkout)

.venv/ready: scripts/setup.py requirements/dev.lock
	@$(PYTHON) scripts/setup.py && touch $@

quickstart: setup ## install, build, bring up a two-node Kubernetes, fine-tune a small model on two pods
	@$(BIN)/lockstep quickstart

##@ Clusters (CLUSTER=name of a file in clusters/, MODE=rdma|tcp|auto, FORCE=1: whatever the API host)
list-clusters: setup ## the cluster files in clusters/
	@$(BIN)/lockstep clusters

deploy-cluster: setup ## install CRDs, operator, profile and service account
	@$(BIN)/lockstep deploy $(CLUSTER) --mode $(MODE) $(if $(FORCE),--force)

deploy-cluster-dry-run: setup ## print every object that deploy-cluster would send; needs no cluster
	@$(BIN)/lockstep deploy $(CLUSTER) --mode $(MODE) --dry-run

status-cluster: setup ## operator, profile and jobs of a cluster
	@$(BIN)/lockstep status $(CLUSTER)

clean-cluster: setup ## remove jobs, operator, profile and CRDs; claims stay
	@$(BIN)/lockstep clean $(CLUSTER) $(if $(FORCE),--force)

logs: setup ## follow a job's log: JOB=name
	@$(BIN)/lockstep logs $(JOB) --cluster $(CLUSTER) --follow

##@ The embedded cluster (a real Kubernetes on this machine, without Docker; root)
cluster-up: setup ## bring it up or repair it: NODES=2
	@$(BIN)/lockstep devcluster up --nodes $(NODES)

cluster-down: setup ## remove it; the cache stays
	@$(BIN)/lockstep devcluster down

##@ Develop
test: test-unit test-train test-faults test-cluster ## all tests

test-unit: setup ## seconds, no root
	@$(PYTEST) tests/unit

test-train: setup ## real ranks over gloo, no root
	@$(PYTEST) tests/train

test-faults: setup ## power cut at every step of a save, on a disk in a file; root
	@$(PYTEST) tests/faults

test-cluster: setup ## a real API server and real pods; root
	@$(PYTEST) tests/cluster

drills: setup ## faults done to a training job on the embedded cluster: what each costs, and that nothing is lost (part of test-cluster); root
	@$(PYTEST) tests/cluster/operator/test_drills.py

lint: setup ## ruff, mypy, import rules, generated files unchanged
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/mypy && $(BIN)/lint-imports --no-logo && $(BIN)/python scripts/generate.py all --check

format: setup ## let ruff format and sort
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --quiet --fix .

manifests: setup ## generate the CRDs and the reference pages from the models
	@$(BIN)/python scripts/generate.py all

lock: setup ## pin every dependency with hashes into requirements/*.lock
	@$(BIN)/python scripts/lock.py

# One line for each target; `lockstep` and scripts/ do the work. `make help` lists the targets.
PYTHON ?= python3
CLUSTER ?= $(or $(shell cat $(or $(LOCKSTEP_STATE),.lockstep)/cluster 2>/dev/null),local)
JOB ?= ml-dev-env
NODE ?= 0
NODES ?= 2
SCRIPT ?= train_multi_node.py
FILE ?= $(SCRIPT)
SURE = $(if $(YES),--yes)
CHOSEN = $(if $(MODE),--mode $(MODE))
DEPLOY = $(CHOSEN) $(if $(OPERATOR_IMAGE),--image $(OPERATOR_IMAGE)) $(if $(NAMESPACES),--namespaces $(NAMESPACES)) $(if $(NAMESPACE_ONLY),--namespace-only) $(if $(FORCE),--force) $(if $(filter 0,$(DEV)),--no-dev)
IMAGE ?= operator
BIN := .venv/bin
# All checkouts of a user share it, so that a fresh clone is checked as fast as an old one: mypy compares files by their content.
MYPY_CACHE := $(or $(LOCKSTEP_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/lockstep)/mypy
PYTEST = $(BIN)/pytest --junitxml .lockstep/tests/$@$(if $(TESTS),-some).xml
# Else every pytest rewrites all tests' assertions, and every process of a test compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup editors quickstart discover-cluster lint-cluster gpu-info nccl-test list-clusters deploy-cluster deploy-cluster-dry-run diff status-cluster clean-cluster uninstall rollback sync-multi-node run-multi-node shell-multi-node vscode debug-remote jupyter tensorboard logs top cluster-up cluster-down cluster-programs build build-openshift test test-fast test-unit test-train test-installed test-faults test-operator-faults test-hosts test-long test-corpus test-openshift test-gpu bench-gpu gpu-carry soak test-cluster drills bench-peers engines export-table lint docs pictures format manifests lock sbom audit wheel release test-release

##@ Start
help: ## print this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready ## make .venv (packages are cached outside the checkout)

.venv/ready: scripts/setup.py operator/lockstep/environments.py operator/lockstep/assets.py requirements/dev.lock
	@$(PYTHON) scripts/setup.py && touch $@

editors: setup ## install jupyterlab, debugpy and code-server for the pods of the embedded cluster (make jupyter, make debug-remote, make vscode)
	@$(PYTHON) scripts/setup.py --lock editors

quickstart: setup ## install, build, bring up a two-node Kubernetes, fine-tune a small model on two pods (HOSTS=1: on two hosts over ssh)
	@$(BIN)/lockstep quickstart $(if $(HOSTS),--hosts) $(if $(YES),--yes)

##@ Clusters (CLUSTER=name of a file in clusters/, else the one in use; MODE=rdma|tcp|auto, OPERATOR_IMAGE= and NAMESPACES=a,b or NAMESPACE_ONLY=1, else as deployed; FORCE=1: deploy to any API host, whatever stored jobs lose)
list-clusters: setup ## list the cluster files in clusters/; * marks the one that your kubeconfig talks to
	@$(BIN)/lockstep cluster list

deploy-cluster: setup ## install what your rights allow, and the dev environment ml-dev-env (DEV=0: without it)
	@$(BIN)/lockstep deploy $(CLUSTER) $(DEPLOY)

deploy-cluster-dry-run: setup ## print every object that deploy-cluster would send; needs no cluster
	@$(BIN)/lockstep deploy $(CLUSTER) --dry-run $(DEPLOY)

diff: setup ## show what deploy-cluster would change
	@$(BIN)/lockstep deploy $(CLUSTER) --diff $(DEPLOY)

status-cluster: setup ## show the operator, TrainingCluster and jobs of a cluster
	@$(BIN)/lockstep cluster status $(CLUSTER)

clean-cluster: setup ## remove the dev environment; claims stay (PVCS=1: remove them, too; YES=1: don't ask)
	@$(BIN)/lockstep cluster clean $(CLUSTER) $(if $(PVCS),--pvcs) $(SURE)

uninstall: setup ## remove operator, TrainingClusters and CRDs (JOBS=1: all jobs, too; CLUSTER_ONLY=1: this TrainingCluster alone; YES=1: don't ask); claims stay
	@$(BIN)/lockstep cluster uninstall $(CLUSTER) $(if $(JOBS),--jobs) $(if $(CLUSTER_ONLY),--cluster-only) $(SURE)

rollback: setup ## restore the operator and TrainingCluster that the last deployment replaced
	@$(BIN)/lockstep cluster rollback $(CLUSTER) $(SURE)

discover-cluster: setup ## write clusters/NAME.yaml from what your kubeconfig's cluster shows: NAME=mine
	@$(BIN)/lockstep cluster discover $(NAME)

lint-cluster: setup ## check the cluster file alone and against its cluster
	@$(BIN)/lockstep cluster lint $(CLUSTER)

gpu-info: setup ## show the GPUs of every pod of the dev environment, with memory, load and temperature (JOB=name: of another job)
	@$(BIN)/lockstep top $(JOB) --once --cluster $(CLUSTER)

nccl-test: setup ## measure all-reduce over the cluster's nodes (SAVE=1: store it in the cluster file); replaces mpirun and nccl-tests
	@$(BIN)/lockstep cluster calibrate $(CLUSTER) $(CHOSEN) $(if $(SAVE),--save)

##@ The dev environment (JOB=ml-dev-env, NODE=0)
sync-multi-node: setup ## send workspace/ to all of its pods (WATCH=1: again whenever something changes)
	@CLUSTER=$(CLUSTER) scripts/sync-multi-node.sh $(JOB) $(if $(WATCH),--watch) $(if $(FORCE),--force)

run-multi-node: setup ## start a script on all nodes: SCRIPT=train_multi_node.py ARGS="--epochs 3"
	@$(BIN)/lockstep run --job $(JOB) --cluster $(CLUSTER) $(SCRIPT) $(ARGS)

shell-multi-node: setup ## open a shell in one of its pods
	@$(BIN)/lockstep shell $(JOB) --node $(NODE) --cluster $(CLUSTER)

vscode: setup ## open VS Code of one of its pods in your browser, behind a token, on this machine's loopback
	@$(BIN)/lockstep vscode $(JOB) --node $(NODE) --cluster $(CLUSTER)

debug-remote: setup ## start a script in one pod under the debugger: FILE=train.py ARGS=… (ATTACH=1: reach one that waits for a debugger already)
	@$(BIN)/lockstep debug $(JOB) --node $(NODE) --cluster $(CLUSTER) $(if $(ATTACH),--attach,$(FILE) -- $(ARGS))

jupyter: setup ## run a notebook server in one of its pods, behind a token, on this machine's loopback
	@$(BIN)/lockstep jupyter $(JOB) --node $(NODE) --cluster $(CLUSTER)

tensorboard: setup ## run TensorBoard for its runs, behind a token, on this machine's loopback
	@$(BIN)/lockstep tensorboard $(JOB) --node $(NODE) --cluster $(CLUSTER)

logs: setup ## follow a job's log: JOB=name, RANK=3 or NODE=1; ERRORS=1: how its ranks failed
	@$(BIN)/lockstep logs $(JOB) --cluster $(CLUSTER) $(if $(RANK),--rank $(RANK),--node $(NODE)) $(if $(ERRORS),--errors,--follow)

top: setup ## watch a job's progress: JOB=name
	@$(BIN)/lockstep top $(JOB) --cluster $(CLUSTER)

##@ Images (IMAGE=operator|trainer, BASE=, TAG=, PUSH=1: also to the registry that TAG names)
build: setup $(if $(filter docs,$(IMAGE)),docs) ## build an image with podman, buildah or docker, the first that is installed: IMAGE=operator, trainer or docs
	@$(BIN)/lockstep build $(IMAGE) $(if $(BASE),--base $(BASE)) $(if $(TAG),--tag $(TAG)) $(if $(TOOL),--tool $(TOOL)) $(if $(PUSH),--push)

build-openshift: setup $(if $(filter docs,$(IMAGE)),docs) ## let OpenShift build it into an ImageStream: NAMESPACE=, CLUSTER=
	@$(BIN)/lockstep build $(IMAGE) --openshift $(if $(BASE),--base $(BASE)) $(if $(TAG),--tag $(TAG)) $(if $(NAMESPACE),-n $(NAMESPACE)) $(if $(filter command environment,$(origin CLUSTER)),--cluster $(CLUSTER))

##@ The embedded cluster (a real Kubernetes on this machine, without Docker; root)
cluster-up: setup ## bring it up or repair it: NODES=2
	@$(BIN)/lockstep devcluster up --nodes $(NODES)

cluster-down: setup ## remove it; the cache stays
	@$(BIN)/lockstep devcluster down

cluster-programs: setup ## install and build what it is made of, and start nothing: minutes the first time
	@$(BIN)/python -m lockstep.cli.clusters.devcluster

##@ Develop
test: setup ## run the linters and all tests but the longest (test-long), in two lanes side by side; root
	@$(BIN)/python scripts/lanes.py

test-fast: setup ## run the linters and the tests of what differs from a commit: SINCE=main (default: HEAD)
	@$(BIN)/python scripts/lanes.py --since $(or $(SINCE),HEAD)

test-unit: setup ## run the unit tests: minutes, no root
	@$(PYTEST) -n 2 $(or $(TESTS),tests/unit tests/foreign)

test-train: setup ## run the trainer's tests: real ranks over gloo, no root
	@$(PYTEST) -n 3 $(or $(TESTS),tests/train tests/corpus)

test-installed: setup ## type every verb in an empty folder where the wheel is all there is of Lockstep: a minute, no root
	@$(PYTEST) $(or $(TESTS),tests/installed)

test-faults: cluster-programs ## cut the power at every step of a save, on a disk in a file; kill the operator at every write; run alerts and dashboard in Prometheus; root
	@$(PYTEST) -n 2 $(or $(TESTS),tests/faults)

test-hosts: setup ## test jobs on three hosts over ssh, with a systemd and an sshd each; root
	@$(PYTEST) -n 3 --dist loadfile $(or $(TESTS),tests/hosts)

test-long: cluster-programs ## run the long tests that make test leaves out: three quarters of an hour and 30 GB of disk; root
	@$(PYTEST) -m long tests/programs tests/train tests/faults tests/hosts tests/cluster
	@$(PYTEST) -m hypothesis --hypothesis-profile search tests/unit  # other examples each time

test-corpus: cluster-programs ## inject known faults into real jobs and count how many `lockstep why` names; faults of ranks are part of test, the others take a quarter of an hour; root
	@$(PYTEST) -m "corpus or not corpus" tests/corpus tests/cluster/operator/life/test_corpus.py

test-openshift: cluster-programs ## test on OpenShift's own control plane, with its oc, built from clones or unpacked archives of openshift/microshift (SOURCE=) and openshift/oc (OC=): half an hour the first time; root
	@LOCKSTEP_OPENSHIFT_SOURCE=$(abspath $(SOURCE)) LOCKSTEP_OPENSHIFT_OC=$(abspath $(OC)) $(PYTEST) -m "long or not long" $(or $(TESTS),tests/openshift)

test-gpu: ## test that Lockstep trains on this machine's GPU as on CPUs, without .venv: PYTHON with torch, transformers and peft; ARGS="--device cpu"
	@$(PYTHON) tests/gpu/run.py $(ARGS)

bench-gpu: ## measure this machine's GPU beside Hugging Face and PEFT for 530 s, without .venv; again: the rows without a result in .gpu-bench: ARGS="--seconds 230 --row 8b-lora-4k"
	@$(PYTHON) tests/bench/gpu.py $(ARGS)

gpu-carry: setup ## put into a folder what a GPU machine without network lacks for the two targets above: DeepSpeed, what it imports, and Liger (PYTHON_THERE=3.12)
	@$(BIN)/python scripts/gpu_carry.py --python $(or $(PYTHON_THERE),3.12)

soak: cluster-programs ## send hundreds of hostile objects to a real API server, and run other tests that take minutes; by hand
	@$(PYTEST) -s -m soak tests/faults

test-operator-faults: cluster-programs ## kill the operator before and after every single write, each in a run of its own: half an hour
	@LOCKSTEP_FAULTS=all $(PYTEST) tests/faults/test_operator_faults.py -s -k killed

test-cluster: cluster-programs ## test a real API server and real pods; root
	@$(PYTEST) -n auto $(or $(TESTS),tests/cluster)

drills: cluster-programs ## inject faults into a training job on the embedded cluster, into one node of three, and into the operator at every write; print what each costs; root
	@$(PYTEST) -m "not corpus and not soak" tests/cluster/operator/life/test_drills.py tests/cluster/operator/life/test_lost_node.py tests/faults/test_operator_faults.py

bench-peers: cluster-programs ## compare Lockstep with JobSet and Kubeflow Trainer, both built from their Go modules: 22 minutes (ARGS=--quick: six); root
	@$(BIN)/python tests/bench/peers/run.py $(ARGS)

engines: setup ## install vLLM and compile llama.cpp, each into an environment of its own: 6 GB, a quarter of an hour the first time
	@$(BIN)/python -m lockstep.platforms.engines.environments

export-table: engines ## let PEFT, vLLM and llama.cpp read exported adapters of many families, and print the table of docs/how-to/export.md: an hour
	@$(BIN)/python tests/bench/export/table.py $(ARGS)

lint: setup ## check: ruff, mypy, import rules, generated files, what upgrades lose, the site's links, secrets in files, scripts/budget.yaml
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet --select I . || { echo 'Files are not formatted: run `make format`.' >&2; exit 1; }
	@$(BIN)/ruff check --quiet . && $(BIN)/mypy --cache-dir $(MYPY_CACHE) && $(BIN)/lint-imports --no-logo && $(BIN)/python scripts/generate.py all --check && $(BIN)/python scripts/additive.py && $(BIN)/python scripts/docs.py && $(BIN)/python scripts/leaks.py && $(BIN)/python scripts/budget.py

docs: setup ## build the site of docs/ into dist/site; links that lead nowhere are errors (SERVE=8000: show it at 127.0.0.1:8000)
	@$(BIN)/python scripts/docs.py $(if $(SERVE),--serve $(SERVE))

pictures: setup ## record docs/pictures anew from real runs, and fail if their words have changed (SCENE=help; ARGS=--check: write nothing); root, kubectl
	@PYTHONPATH=scripts $(BIN)/python -m pictures $(ARGS) $(SCENE)

format: setup ## format and sort the code with ruff; lower what has fallen in scripts/budget.yaml
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --quiet --fix . && $(BIN)/python scripts/budget.py --lower

manifests: setup ## generate the CRDs and the reference pages from the models
	@$(BIN)/python scripts/generate.py all

wheel: setup ## build the wheel, which brings all but the packages, into dist/
	@$(BIN)/python scripts/supply.py wheel

release: setup ## make wheel, sdist, images, ways to install, SBOM, provenance, checksums and notes of a commit in dist/: REGISTRY= of the images, BASE= of both, TRAINER=0: without the trainer's image, KEY=cosign.key: sign; publishes nothing
	@PYTHONPATH=scripts $(BIN)/python -m release $(if $(REGISTRY),--registry $(REGISTRY)) $(if $(BASE),--base $(BASE)) $(if $(filter 0,$(TRAINER)),--no-trainer) $(if $(KEY),--key $(KEY))

test-release: setup ## make a release twice and compare, sign it, install it: builds images and programs, and needs root
	@$(PYTEST) -m "long or not long" $(or $(TESTS),tests/release)

sbom: setup ## list the packages of the images and the command line, as CycloneDX, in dist/sbom/
	@$(BIN)/python scripts/supply.py sbom

audit: setup ## look every locked package up in a database of known vulnerabilities (LOCKSTEP_OSV=URL of a mirror); exit code 3: it can't be reached (OFFLINE=1: pass then)
	@$(BIN)/python scripts/supply.py audit $(if $(OFFLINE),--offline)

lock: setup ## pin every dependency with hashes into requirements/*.lock
	@$(BIN)/python scripts/lock.py

# Each target does its own set-up. What is needed: Python >= 3.11 with venv, and make. `make help` lists the targets.

PYTHON ?= python3
UV_VERSION := 0.13.8
VENV := .venv
TORCH_VENV := .venv-torch
SDK_VENV := .venv-sdk
OLDEST_VENV := .venv-airflow-oldest
OLDEST_KFP_VENV := .venv-kfp-oldest
STEP_VENV := .venv-step
BENCH_VENV := .venv-bench
DOCS_VENV := .venv-docs
OCI_VENV := .venv-oci
PEERS_VENV := .venv-peers
STORES_VENV := .venv-stores
BUILD_VENV := .venv-build
REGISTRY_VENVS := .venv-registry-v1 .venv-registry-v1alpha3
BIN := $(VENV)/bin
# Hashes are checked wherever a list has them; what builds this package is pinned as well.
UV := $(BIN)/uv pip install --quiet --build-constraints constraints/build.txt
PIN := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url
PYTEST := $(BIN)/python -m pytest
# `make test COVERAGE=yes`: what the tests run of the code. It costs the unit tests a third more CPU, so not always.
MEASURED = $(if $(COVERAGE),--cov --cov-report=)

# Some machines forbid it; without cached bytecode every process compiles Airflow or MLflow anew (9 s instead of 2).
unexport PYTHONDONTWRITEBYTECODE
# Shared by all checkouts: mypy compares contents, and takes a minute of CPU for what it has not seen before.
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trainjob/mypy
export MLFLOW_DISABLE_TELEMETRY := true
export DO_NOT_TRACK := true
export AIRFLOW__USAGE_DATA_COLLECTION__ENABLED := False

.PHONY: help
help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 20

# ---------------------------------------------------------------- environments

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ": make PYTHON=python3.x" if sys.version_info < (3, 11) else 0)'
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed (Debian: apt install python3-venv)"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

# Not `demo.stamp`: `make test-unit` works without Airflow, KFP and MLflow, and is there in seconds.
$(VENV)/core.stamp: $(BIN)/uv pyproject.toml constraints/main-hashed.txt
	@echo "installing the core and what its unit tests need"
	@$(UV) --python $(BIN)/python --constraints constraints/main-hashed.txt --editable '.[hf,kubernetes,model-registry,sign,storage]' --group unit
	@touch $@

$(VENV)/demo.stamp: $(BIN)/uv pyproject.toml constraints/main-hashed.txt
	@echo "installing trainjob with Airflow, Kubeflow Pipelines, MLflow and JAX"
	@$(UV) --python $(BIN)/python --constraints constraints/main-hashed.txt --editable '.[all,examples]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	@echo "installing what the tests need"
	@$(UV) --python $(BIN)/python --constraints constraints/main-hashed.txt --editable '.[all,examples]' --group test
	@touch $@ $(VENV)/core.stamp  # which this includes

$(TORCH_VENV)/stamp: $(BIN)/uv constraints/torch.txt
	@echo "setting up $(TORCH_VENV) with PyTorch (about 5 GB)"
	@$(PYTHON) -m venv --without-pip $(TORCH_VENV)
	@$(UV) --python $(TORCH_VENV)/bin/python --require-hashes --requirements constraints/torch.txt
	@$(UV) --python $(TORCH_VENV)/bin/python --no-deps --editable .
	@touch $@

$(SDK_VENV)/stamp: $(BIN)/uv constraints/sdk.txt
	@echo "setting up $(SDK_VENV) with the Kubeflow SDK"
	@$(PYTHON) -m venv --without-pip $(SDK_VENV)
	@$(UV) --python $(SDK_VENV)/bin/python --require-hashes --requirements constraints/sdk.txt
	@touch $@

$(OLDEST_VENV)/stamp: $(BIN)/uv pyproject.toml constraints/airflow-oldest.txt
	@echo "setting up $(OLDEST_VENV) with the oldest Airflow that is supported"
	@$(PYTHON) -m venv --without-pip $(OLDEST_VENV)
	@$(UV) --python $(OLDEST_VENV)/bin/python --require-hashes --requirements constraints/airflow-oldest.txt
	@$(UV) --python $(OLDEST_VENV)/bin/python --no-deps --editable .
	@touch $@

$(OLDEST_KFP_VENV)/stamp: $(BIN)/uv pyproject.toml constraints/kfp-oldest.txt
	@echo "setting up $(OLDEST_KFP_VENV) with the oldest SDK of Kubeflow Pipelines that is supported"
	@$(PYTHON) -m venv --without-pip $(OLDEST_KFP_VENV)
	@$(UV) --python $(OLDEST_KFP_VENV)/bin/python --require-hashes --requirements constraints/kfp-oldest.txt
	@$(UV) --python $(OLDEST_KFP_VENV)/bin/python --no-deps --editable .
	@touch $@

$(STEP_VENV)/stamp: $(BIN)/uv pyproject.toml constraints/step-image.txt
	@echo "setting up $(STEP_VENV) with what the step image has"
	@$(PYTHON) -m venv --without-pip $(STEP_VENV)
	@$(UV) --python $(STEP_VENV)/bin/python --require-hashes --no-deps --requirements constraints/step-image.txt
	@$(UV) --python $(STEP_VENV)/bin/python --no-deps --editable .
	@touch $@

$(BUILD_VENV)/stamp: $(BIN)/uv constraints/build.txt
	@echo "setting up $(BUILD_VENV) with what builds wheels and writes SBOMs"
	@$(PYTHON) -m venv --without-pip $(BUILD_VENV)
	@$(UV) --python $(BUILD_VENV)/bin/python --require-hashes --requirements constraints/build.txt
	@touch $@

$(DOCS_VENV)/stamp: $(BIN)/uv constraints/docs.txt
	@echo "setting up $(DOCS_VENV) with what builds the documentation"
	@$(PYTHON) -m venv --without-pip $(DOCS_VENV)
	@$(UV) --python $(DOCS_VENV)/bin/python --require-hashes --requirements constraints/docs.txt
	@$(UV) --python $(DOCS_VENV)/bin/python --no-deps --editable .
	@touch $@

# Official clients of the Kubeflow Model Registry, one for each version of its API; 22 MB each.
$(REGISTRY_VENVS:%=%/stamp): .venv-registry-%/stamp: $(BIN)/uv constraints/registry-%.txt
	@echo "setting up .venv-registry-$* with a client of the Kubeflow Model Registry"
	@$(PYTHON) -m venv --without-pip .venv-registry-$*
	@$(UV) --python .venv-registry-$*/bin/python --require-hashes --requirements constraints/registry-$*.txt
	@touch $@

$(BENCH_VENV)/stamp: $(BIN)/uv constraints/bench.txt
	@echo "setting up $(BENCH_VENV) with Airflow's own Kubernetes provider"
	@$(PYTHON) -m venv --without-pip $(BENCH_VENV)
	@$(UV) --python $(BENCH_VENV)/bin/python --require-hashes --requirements constraints/bench.txt
	@touch $@

$(OCI_VENV)/stamp: $(BIN)/uv constraints/oci.txt
	@echo "setting up $(OCI_VENV) with another client of container registries"
	@$(PYTHON) -m venv --without-pip $(OCI_VENV)
	@$(UV) --python $(OCI_VENV)/bin/python --require-hashes --requirements constraints/oci.txt
	@touch $@

# 140 MB.
$(PEERS_VENV)/stamp: $(BIN)/uv constraints/peers.txt
	@echo "setting up $(PEERS_VENV) with KServe's downloader and a mirror of the Hugging Face Hub"
	@$(PYTHON) -m venv --without-pip $(PEERS_VENV)
	@$(UV) --python $(PEERS_VENV)/bin/python --require-hashes --requirements constraints/peers.txt
	@touch $@

$(STORES_VENV)/stamp: $(BIN)/uv constraints/stores.txt
	@echo "setting up $(STORES_VENV) with other clients of object stores"
	@$(PYTHON) -m venv --without-pip $(STORES_VENV)
	@$(UV) --python $(STORES_VENV)/bin/python --require-hashes --requirements constraints/stores.txt
	@touch $@

.PHONY: setup
setup: $(VENV)/test.stamp $(TORCH_VENV)/stamp $(STEP_VENV)/stamp $(REGISTRY_VENVS:%=%/stamp) \
	$(PEERS_VENV)/stamp $(DOCS_VENV)/stamp ## set up the environments of `make test-all`, run nothing

.PHONY: constraints
constraints: $(BIN)/uv ## pin the newest versions that install together
	@$(PIN) --upgrade --extra all --extra examples --group test -o constraints/main.txt pyproject.toml constraints/main.in
	@for name in torch sdk bench build docs registry-v1 registry-v1alpha3 kfp-oldest oci peers stores; do \
		$(PIN) --generate-hashes --upgrade -o constraints/$$name.txt constraints/$$name.in || exit 1; done
	@$(PIN) --generate-hashes --exclude-newer 2025-08-15 --exclude-newer-package apache-airflow-providers-common-compat=2099-12-31 \
		--upgrade -o constraints/airflow-oldest.txt constraints/airflow-oldest.in
	@$(MAKE) --no-print-directory hashes

# `make hashes STEP_EXTRAS='hf in-cluster mlflow sign storage'` for a step image with other extras.
STEP_EXTRAS := hf in-cluster mlflow storage

# Beside main.txt, which stays without hashes: where constraints have some, pip refuses to install from a checkout.
# What of KFP a step's process imports needs none of KFP's dependencies, which would be a third of the image.
.PHONY: hashes
hashes: $(BIN)/uv ## write the lists with hashes that follow from constraints/main.txt, images' included
	@rm -f constraints/main-hashed.txt constraints/step-image.txt constraints/step-image-tune.txt constraints/digits-image.txt
	@$(PIN) --generate-hashes --no-deps -o constraints/main-hashed.txt constraints/main.txt
	@echo kfp | $(PIN) --generate-hashes --no-deps --constraints constraints/main.txt -o constraints/step-image.txt -
	@cp constraints/step-image.txt constraints/step-image-tune.txt
	@$(PIN) --generate-hashes --constraints constraints/main.txt $(STEP_EXTRAS:%=--extra=%) pyproject.toml >> constraints/step-image.txt
	@$(PIN) --generate-hashes --constraints constraints/main.txt $(STEP_EXTRAS:%=--extra=%) --extra=tune pyproject.toml >> constraints/step-image-tune.txt
	@$(PIN) --generate-hashes --constraints constraints/main.txt --extra examples -o constraints/digits-image.txt pyproject.toml

# ---------------------------------------------------------------- demo

.PHONY: demo
demo: $(VENV)/demo.stamp ## retrain a digits model twice, from Airflow and from KFP, and show what came of it
	@$(BIN)/python dags_examples/demo.py

# ---------------------------------------------------------------- tests

# `make test-unit TESTS='tests/unit/test_spec.py -k name'` runs some of a target's tests. SELECT=quick leaves those out
# that are marked `full`, and what only they need; SELECT=full runs only those.
SELECT ?=
SELECTED = $(if $(SELECT),-m '$(if $(filter quick,$(SELECT)),not )full')
full = $(if $(filter quick,$(SELECT)),,$(1))
run = COVERAGE_FILE=.coverage.$@ TRAINJOB_TORCH_PYTHON=$(CURDIR)/$(TORCH_VENV)/bin/python \
	$(PYTEST) $(or $(TESTS),$(1)) $(SELECTED) $(MEASURED)

.PHONY: test
test: $(VENV)/test.stamp ## lint and the tests for each change: one environment, no root, 12 minutes on 2 cores
	@SELECT=quick $(BIN)/python tests/lanes.py "$(MAKE)" \
		"lint test-unit test-docs test-simulation test-stores test-registry" \
		"test-airflow test-kfp test-local"
	@$(REPORT)

.PHONY: test-all
test-all: ## `make test`, and then everything else: a cluster, images, browsers, PyTorch, all docs; needs root
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-rest

# Lanes that take about as long as each other. On 2 cores a fourth makes nothing faster: it lets tests run into their time limits.
.PHONY: test-rest
test-rest: packages ## what `make test` leaves to `make test-all`
	@$(MAKE) --no-print-directory -j2 setup cluster-programs
	@SELECT=full $(BIN)/python tests/lanes.py "$(MAKE)" \
		"test-cluster test-cluster-restarts" \
		"test-airflow test-kfp test-docker test-page $(shell $(PYTHON) tests/oldest.py due)" \
		"test-unit test-registry test-stores test-local test-docs"
	@$(REPORT)

define REPORT
if [ -n "$(COVERAGE)" ]; then $(BIN)/coverage combine --quiet --append; $(BIN)/coverage report --sort=cover | tail -40; fi
endef

.PHONY: packages
packages:
	@sh tests/install-packages.sh tests/apt-packages.txt tests/testcluster/apt-packages.txt tests/containers/apt-packages.txt

.PHONY: lint
lint: $(VENV)/test.stamp ## formatting, lint, types, import contracts
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache | tail -8

.PHONY: test-unit
test-unit: $(VENV)/core.stamp ## pure functions and small I/O; what to run after each edit
	$(call run,tests/unit -n 2)

.PHONY: test-simulation
test-simulation: $(VENV)/test.stamp ## the launch protocol on a virtual clock: processes that are killed, requests that are lost
	$(call run,tests/simulation)

.PHONY: test-local
test-local: $(VENV)/test.stamp $(call full,$(TORCH_VENV)/stamp) ## real processes on the local backend, a real container registry
	$(call run,tests/contract tests/local tests/oci)

.PHONY: test-registry
test-registry: $(VENV)/test.stamp $(call full,$(REGISTRY_VENVS:%=%/stamp)) ## model registries: MLflow on SQLite and as a server on PostgreSQL, the Kubeflow Model Registry's API
	$(call run,tests/registry)

.PHONY: test-stores
test-stores: $(VENV)/test.stamp $(call full,$(PEERS_VENV)/stamp) ## copies from and to real servers of every kind of store
	$(call run,tests/stores)

.PHONY: test-airflow
test-airflow: $(VENV)/test.stamp $(call full,$(TORCH_VENV)/stamp) ## a real Airflow
	$(call run,tests/airflow)

# Without what is the same on all versions: crashes of ranks, the examples. Of the tests of a whole Airflow those of what
# its versions do differently: how they end a task.
OLDEST := $(patsubst %,tests/airflow/test_%.py,asset_triggers decorator hook killed links log operator provider sensor triggers) \
	$(patsubst %,tests/airflow/system/test_%,kills.py::test_marked_by_a_person losses.py::test_a_worker_is_drained \
	losses.py::test_a_triggerer_is_killed)

.PHONY: test-airflow-oldest
test-airflow-oldest: PYTEST = $(OLDEST_VENV)/bin/python -m pytest
test-airflow-oldest: $(OLDEST_VENV)/stamp $(TORCH_VENV)/stamp ## the oldest Airflow that is supported
	$(call run,$(OLDEST))
	@[ -n "$(TESTS)" ] || $(PYTHON) tests/oldest.py passed $@

.PHONY: test-kfp
test-kfp: $(VENV)/test.stamp $(call full,$(STEP_VENV)/stamp) ## the KFP compiler, executor and kfp.local
	$(call full,TRAINJOB_STEP_PYTHON=$(CURDIR)/$(STEP_VENV)/bin/python) $(call run,tests/kfp)

.PHONY: test-kfp-oldest
test-kfp-oldest: PYTEST = $(OLDEST_KFP_VENV)/bin/python -m pytest
test-kfp-oldest: $(OLDEST_KFP_VENV)/stamp ## the oldest SDK of Kubeflow Pipelines that is supported
	$(call run,$(patsubst %,tests/kfp/test_%.py,authoring compiled distributed execution task_config))
	@[ -n "$(TESTS)" ] || $(PYTHON) tests/oldest.py passed $@

.PHONY: test-docker
test-docker: $(VENV)/test.stamp ## the step image and the KFP components in containers, beside S3, a registry and MLflow
	@sh tests/install-packages.sh tests/containers/apt-packages.txt
	$(call run,tests/containers)

# Before the lanes and not in one of them: a build takes both cores. Downloads of `setup` run beside it.
.PHONY: cluster-programs
cluster-programs: $(VENV)/test.stamp
	@$(BIN)/python -m tests.testcluster.build control-plane node gangs

# Several files at a time on one cluster; those that stop a part of it have a cluster for themselves.
ON_CLUSTER := -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: test-cluster
test-cluster: cluster-programs $(TORCH_VENV)/stamp ## a real Kubernetes with Trainer, JobSet and Kueue, built here once
	@sh tests/install-packages.sh tests/testcluster/apt-packages.txt
	$(call run,tests/cluster --ignore tests/cluster/restarts --ignore tests/cluster/test_trainer_versions.py $(ON_CLUSTER))

.PHONY: test-cluster-restarts
test-cluster-restarts: cluster-programs ## what holds while parts of a cluster are stopped, restarted and reconfigured
	$(call run,tests/cluster/restarts)

.PHONY: test-trainer-oldest
test-trainer-oldest: $(VENV)/test.stamp ## the oldest supported releases of Trainer, on clusters of their own
	$(call run,tests/cluster/test_trainer_versions.py)
	@[ -n "$(TESTS)" ] || $(PYTHON) tests/oldest.py passed $@

# Also as a part of `make test-rest`: nothing of them is left to `make test`.
test-airflow-oldest test-kfp-oldest test-trainer-oldest: SELECT =

# What needs no cluster, no complete Airflow and no PyTorch. `make PYTHONS=3.13 test-pythons` tests one version.
PYTHONS := 3.12 3.13
$(PYTHONS:%=.venv-%/stamp): .venv-%/stamp: $(BIN)/uv pyproject.toml constraints/main-hashed.txt
	@echo "setting up .venv-$* with Python $*"
	@interpreter=$$($(BIN)/python tests/interpreter.py $*) && $$interpreter -m venv --without-pip .venv-$*
	@$(UV) --python .venv-$*/bin/python --constraints constraints/main-hashed.txt --editable '.[all,examples]' --group test
	@touch $@

.PHONY: test-pythons $(PYTHONS:%=test-python-%)
test-pythons: $(PYTHONS:%=test-python-%) ## newer versions of Python than the one of `make test`
$(PYTHONS:%=test-python-%): test-python-%: .venv-%/stamp
	.venv-$*/bin/python -m pytest $(or $(TESTS),tests/unit tests/contract tests/kfp tests/airflow --ignore tests/airflow/system) -n 2

# ---------------------------------------------------------------- campaigns

.PHONY: campaign campaign-local campaign-sizes campaign-simulation campaign-cluster campaign-terminate campaign-mutants
campaign: packages ## all schedules of what `make test-all` samples, the oldest versions and newer Pythons; see docs/development/campaigns.md
	@$(MAKE) --no-print-directory -j2 setup cluster-programs
	@rm -f .test-output/campaign-*.xml
	@$(MAKE) --keep-going campaign-local campaign-sizes campaign-simulation campaign-cluster campaign-terminate \
		campaign-mutants \
		test-airflow-oldest test-kfp-oldest test-trainer-oldest test-pythons sbom; \
		status=$$?; $(BIN)/python -m tests.docs.campaigns; exit $$status

campaign-%: export TRAINJOB_CAMPAIGN = 1
campaign-local: $(VENV)/test.stamp $(TORCH_VENV)/stamp ## 300 kills of programs, 300 of exports with an evaluation, 100 of launchers, 200 of studies, 50 of pushes; 500 preemptions; 200 hangs
	$(call run,-s --junitxml=.test-output/$@.xml -o junit_family=xunit1 \
		tests/local/test_kills.py tests/local/test_gate_kills.py tests/local/test_chaos.py \
		tests/local/test_tuning_kills.py tests/local/test_preemptions.py tests/local/test_hangs.py tests/oci/test_faults.py)

campaign-sizes: $(TORCH_VENV)/stamp cluster-programs ## 20 GiB, 10,000 files, 50 tasks, an outage of 2 minutes
	$(call run,-s --junitxml=.test-output/$@.xml -o junit_family=xunit1 tests/local/test_memory.py tests/oci/test_memory.py \
		tests/stores/test_contract.py tests/airflow/system/test_many.py tests/airflow/system/test_examples.py \
		tests/cluster/restarts/test_airflow_system.py)

campaign-simulation: $(VENV)/test.stamp ## 4,000 schedules of each mix of the simulation, of the local backend and of exports, with new seeds
	$(BIN)/python -m tests.simulation campaign --schedules 4000
	TRAINJOB_SIMULATION=4000 $(PYTEST) -s tests/simulation/test_local_schedules.py tests/simulation/test_export_schedules.py \
		-k test_random_schedules

campaign-cluster: cluster-programs ## 200 schedules of faults, and 200 of waiters and reapers; 200 hangs, 100 preemptions
	$(call run,-s --junitxml=.test-output/$@.xml -o junit_family=xunit1 \
		tests/cluster/test_fault_schedules.py tests/cluster/test_unattended_schedules.py \
		tests/cluster/test_hangs.py tests/cluster/test_preemptions.py)

campaign-terminate: cluster-programs ## 100 KFP steps that are terminated; needs the machine for itself
	$(call run,-s --junitxml=.test-output/$@.xml -o junit_family=xunit1 tests/cluster/test_kfp_terminate.py)

campaign-mutants: $(VENV)/test.stamp ## 200 changes of the core that a test has to notice
	$(BIN)/python tests/mutants.py --write

# ---------------------------------------------------------------- records

.PHONY: record-diagnosis
record-diagnosis: $(VENV)/test.stamp $(TORCH_VENV)/stamp ## make every failure on the test cluster; write what was seen for the unit tests
	@sh tests/install-packages.sh tests/testcluster/apt-packages.txt
	TRAINJOB_RECORD=1 TRAINJOB_TORCH_PYTHON=$(CURDIR)/$(TORCH_VENV)/bin/python $(PYTEST) tests/cluster/test_diagnosis.py

.PHONY: record-doctor
record-doctor: $(VENV)/test.stamp ## run `trainjob doctor` on the test cluster; write what it says into docs/how-to/cluster.md
	TRAINJOB_RECORD=1 $(PYTEST) tests/cluster/restarts/test_doctor_page.py

.PHONY: record-screenshot
record-screenshot: $(VENV)/test.stamp ## run a failing task in a real Airflow; write the screenshot of README.md
	TRAINJOB_RECORD=1 $(PYTEST) tests/airflow/system/test_ui.py -k a_failed_task

.PHONY: cluster cluster-down
cluster: $(VENV)/test.stamp ## start the test cluster for use by hand, as root with a node that runs real pods
	@sh tests/install-packages.sh tests/testcluster/apt-packages.txt
	@$(BIN)/python -m tests.testcluster up $$([ "$$(id -u)" = 0 ] && echo --real-node)

cluster-down: ## stop it; nothing is left behind
	@$(BIN)/python -m tests.testcluster down

.PHONY: docs
docs: $(DOCS_VENV)/stamp ## build the documentation into site/; fails on a broken link
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

.PHONY: test-docs
test-docs: $(VENV)/test.stamp $(call full,$(DOCS_VENV)/stamp) ## every snippet of README.md and docs/, the site and its links
	TRAINJOB_MKDOCS=$(CURDIR)/$(DOCS_VENV)/bin/mkdocs $(call run,tests/docs)

.PHONY: test-page
test-page: $(VENV)/test.stamp ## the page of a training in a browser: screenshots, accessibility, live updates
	$(call run,tests/page)

.PHONY: record-sdk
record-sdk: $(VENV)/test.stamp $(SDK_VENV)/stamp ## record again what the Kubeflow SDK sends (tests/conformance)
	$(BIN)/python -m tests.conformance.record $(SDK_VENV)/bin/python
	$(BIN)/python -m tests.docs.sdk

.PHONY: bench
bench: $(VENV)/test.stamp $(SDK_VENV)/stamp $(BENCH_VENV)/stamp $(OCI_VENV)/stamp $(STORES_VENV)/stamp ## measurements, one JSON object a line
	@for script in tests/bench/*.py; do $(BIN)/python $$script || exit 1; done

# ---------------------------------------------------------------- release

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' components/trainjob/version.py)
SBOM = $(BUILD_VENV)/bin/cyclonedx-py environment --pyproject build/wheel/pyproject.toml --output-reproducible

# The wheel's SBOM is within the wheel, too (PEP 770). The step image's Dockerfile writes that of the image by the same lists.
.PHONY: sbom
sbom: $(BUILD_VENV)/stamp $(STEP_VENV)/stamp ## build the wheel, and SBOMs (CycloneDX) of it and of the step image, into dist/
	@rm -rf build dist && mkdir -p build/wheel dist
	@cp -r pyproject.toml README.md LICENSE NOTICE components airflow_provider kfp_components build/wheel
	@sed -i 's/^dynamic = .*/version = "$(VERSION)"/' build/wheel/pyproject.toml
	@$(PYTHON) -m venv --without-pip build/all
	@$(UV) --python build/all/bin/python --constraints constraints/main-hashed.txt './build/wheel[all,examples]'
	@$(SBOM) --mc-type library --output-file build/wheel/trainjob.cdx.json build/all/bin/python
	@$(SBOM) --mc-type application --output-file dist/trainjob-step-$(VERSION).cdx.json $(STEP_VENV)/bin/python
	@cp build/wheel/trainjob.cdx.json dist/trainjob-$(VERSION).cdx.json
	@sed -i 's/^\[tool.hatch.build.targets.wheel\]$$/&\nsbom-files = ["trainjob.cdx.json"]/' build/wheel/pyproject.toml
	@$(BUILD_VENV)/bin/python -m build --wheel --no-isolation --outdir dist build/wheel > build/log || { cat build/log; exit 1; }
	@rm -rf build

.PHONY: clean
clean: ## remove environments and everything that was made here
	rm -rf .venv .venv-* build dist site .demo .test-output .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis

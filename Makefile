# Each target does its own set-up. What is needed: Python >= 3.11 with venv, and make. `make help` lists the targets.

PYTHON ?= python3
UV_VERSION := 0.13.8
VENV := .venv
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
	@grep -E '^[a-z%-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 20

# ---------------------------------------------------------------- environments

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ": make PYTHON=python3.x" if sys.version_info < (3, 11) else 0)'
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed (Debian: apt install python3-venv)"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(VENV)/demo.stamp: $(BIN)/uv pyproject.toml constraints/main-hashed.txt
	@echo "installing trainjob with Airflow, Kubeflow Pipelines, MLflow and JAX"
	@$(UV) --python $(BIN)/python --constraints constraints/main-hashed.txt --editable '.[all,examples]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	@echo "installing what the tests need"
	@$(UV) --python $(BIN)/python --constraints constraints/main-hashed.txt --editable '.[all,examples]' --group test
	@touch $@

# Each of these environments has the packages of one list, which is complete, and trainjob where something runs it there.
# The first ones are for `make test-all`, the others for `make campaign`, `make bench` and `make sbom`.
TESTED := torch step docs registry-v1 registry-v1alpha3
LISTS := torch docs registry-v1 registry-v1alpha3 airflow-oldest kfp-oldest peers sdk bench oci build
WITH_TRAINJOB := torch step docs airflow-oldest kfp-oldest
$(LISTS:%=.venv-%/stamp): .venv-%/stamp: constraints/%.txt
.venv-step/stamp: constraints/step-image.txt
.venv-%/stamp: $(BIN)/uv pyproject.toml
	@echo "setting up .venv-$* from $(filter constraints/%,$^)"
	@$(PYTHON) -m venv --without-pip .venv-$*
	@$(UV) --python .venv-$*/bin/python --require-hashes --no-deps --requirements $(filter constraints/%,$^)
	@$(if $(filter $*,$(WITH_TRAINJOB)),$(UV) --python .venv-$*/bin/python --no-deps --editable .)
	@touch $@

.venv-python-%/stamp: $(BIN)/uv pyproject.toml constraints/main-hashed.txt
	@$(BIN)/uv venv --quiet --clear --python $* .venv-python-$*
	@$(UV) --python .venv-python-$*/bin/python --constraints constraints/main-hashed.txt --editable '.[all,examples]' --group test
	@touch $@

# What `pip install 'trainjob[all]'` gives today.
.PHONY: .venv-newest/stamp
.venv-newest/stamp: $(BIN)/uv
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-newest
	@$(UV) --python .venv-newest/bin/python --editable '.[all,examples]' --group test

.PHONY: setup
setup: $(VENV)/test.stamp $(TESTED:%=.venv-%/stamp) ## set up the environments of `make test-all`, run nothing

.PHONY: constraints
constraints: $(BIN)/uv ## pin the newest versions that install together
	@$(PIN) --upgrade --extra all --extra examples --group test -o constraints/main.txt pyproject.toml constraints/main.in
	@for name in $(filter-out airflow-oldest,$(LISTS)); do \
		$(PIN) --generate-hashes --upgrade -o constraints/$$name.txt constraints/$$name.in || exit 1; done
	@$(PIN) --generate-hashes --exclude-newer 2025-08-15 --exclude-newer-package apache-airflow-providers-common-compat=2099-12-31 \
		--upgrade -o constraints/airflow-oldest.txt constraints/airflow-oldest.in
	@$(MAKE) --no-print-directory hashes

# `make hashes STEP_EXTRAS='hf kubernetes mlflow sign storage'` for a step image with other extras.
STEP_EXTRAS := hf kubernetes mlflow storage

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

# `make test TESTS='tests/unit/test_spec.py -k name'` runs some tests without those that are marked `full`, which are
# for `make test-rest TESTS=…`. SELECT=quick and SELECT=full do the same for the targets of folders.
SELECT ?=
export SELECT
full = $(if $(filter quick,$(SELECT)),,$(1))
export TRAINJOB_TORCH_PYTHON := $(CURDIR)/.venv-torch/bin/python
# Several files at a time on one cluster; those that stop a part of it have a cluster for themselves.
ON_CLUSTER := -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/cluster/restarts
options = $(if $(filter-out tests/unit,$(1)),,-n 3) $(if $(filter-out tests/cluster,$(1)),,$(ON_CLUSTER))
run = COVERAGE_FILE=.coverage.$@ $(call full,TRAINJOB_STEP_PYTHON=$(CURDIR)/.venv-step/bin/python) $(PYTEST) $(1) $(options) \
	$(if $(SELECT),-m '$(if $(call full,yes),,not )full') $(MEASURED)
folder = $(or $(TESTS),tests/$(patsubst cluster-%,cluster/%,$*))

.PHONY: test
test: SELECT = quick
test: $(VENV)/test.stamp ## lint and the tests for each change: one environment, no root, 12 minutes on 2 cores
ifdef TESTS
	$(call run,$(TESTS))
else
	@$(BIN)/python tests/lanes.py "$(MAKE)" \
		"lint test-unit test-docs test-simulation test-stores test-registry test-local" \
		"test-airflow test-integrations test-kfp test-contract"
	@$(REPORT)
endif

.PHONY: test-all
test-all: ## `make test`, and then everything else: a cluster, images, browsers, PyTorch, all docs; needs root
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-rest

# Programs are built before the lanes and not in one of them: a build takes both cores. Downloads of `setup` run beside it.
# The lanes take about as long as each other. On 2 cores a fourth makes nothing faster: it lets tests run into their time limits.
.PHONY: test-rest
test-rest: SELECT = full
test-rest: packages ## what `make test` leaves to `make test-all`
	@$(MAKE) --no-print-directory -j2 setup cluster-programs
ifdef TESTS
	$(call run,$(TESTS))
else
	@$(BIN)/python tests/lanes.py "$(MAKE)" \
		"test-cluster test-cluster-restarts" \
		"test-airflow test-integrations test-kfp test-containers test-page" \
		"test-unit test-registry test-stores test-local test-oci test-docs"
	@$(REPORT)
endif

define REPORT
if [ -n "$(COVERAGE)" ]; then $(BIN)/coverage combine --quiet --append; $(BIN)/coverage report --sort=cover | tail -40; fi
endef

test-%: $(VENV)/test.stamp ## the tests of one folder, as `make test-unit` or `make test-cluster-restarts`
	$(call run,$(folder))

# What the tests of a folder need besides.
test-airflow test-local test-cluster test-cluster-restarts: $(call full,.venv-torch/stamp)
test-cluster test-cluster-restarts: cluster-programs packages
test-containers test-oci test-page test-stores: $(call full,packages)
test-docs: $(call full,.venv-docs/stamp)
test-kfp: $(call full,.venv-step/stamp)
test-registry: $(call full,.venv-registry-v1/stamp .venv-registry-v1alpha3/stamp packages)

.PHONY: packages
packages:
	@sh tests/install-packages.sh tests/apt-packages.txt tests/testcluster/apt-packages.txt tests/containers/apt-packages.txt

.PHONY: cluster-programs
cluster-programs: $(VENV)/test.stamp
	@$(BIN)/python -m tests.testcluster.build control-plane node

.PHONY: lint
lint: $(VENV)/test.stamp ## formatting, lint, types, import contracts
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache | tail -8

# ---------------------------------------------------------------- campaigns

# docs/development/campaigns.md describes the parts. `terminate` needs the machine for itself.
campaign_local := tests/unit/test_generated_failures.py tests/oci/test_faults.py \
	$(patsubst %,tests/local/test_%.py,kills chaos tuning_kills preemptions hangs)
campaign_sizes := tests/local/test_memory.py tests/oci/test_memory.py tests/stores/test_contract.py \
	tests/airflow/system/test_examples.py tests/cluster/restarts/test_airflow_system.py
campaign_cluster := $(patsubst %,tests/cluster/test_%.py,hangs preemptions gangs used_resources)
campaign_terminate := tests/cluster/test_kfp_terminate.py
campaign_simulation := $(patsubst %,tests/simulation/test_%_schedules.py,local export) -k test_random_schedules
campaign_kserve := tests/stores/test_kserve.py
campaign_trainer-oldest := tests/cluster/test_trainer_versions.py
campaign_kubernetes-oldest := $(patsubst %,tests/cluster/test_%.py,backend blockers contract launch_protocol diagnosis)
campaign_kfp-oldest := $(patsubst %,tests/kfp/test_%.py,authoring compiled distributed execution task_config)
# Without what is the same on all versions: crashes of ranks, the examples. Of the tests of a whole Airflow those of what
# its versions do differently: how they end a task.
campaign_airflow-oldest := $(patsubst %,tests/airflow/test_%.py,asset_triggers decorator hook killed links log operator \
	provider sensor triggers) $(patsubst %,tests/airflow/system/test_%,kills.py::test_marked_by_a_person \
	losses.py::test_a_worker_is_drained losses.py::test_a_triggerer_is_killed)
PARTS := local sizes cluster terminate simulation kserve trainer-oldest kubernetes-oldest kfp-oldest airflow-oldest
VERSIONS := campaign-python-3.12 campaign-python-3.13 campaign-python-3.14 campaign-newest
campaign_versions := tests/unit tests/contract tests/kfp tests/airflow --ignore tests/airflow/system -n 2 -m 'not full'

.PHONY: campaign
campaign: packages ## all schedules of which `make test-all` runs a sample, other versions, 40 mutants: 150 minutes
	@$(MAKE) --no-print-directory -j2 setup cluster-programs
	@$(BIN)/python tests/lanes.py "$(MAKE)" "$(PARTS:%=campaign-%) $(VERSIONS) schedules mutants sbom"

.PHONY: campaign-proof
campaign-proof: ## 20,000 schedules of each mix of the simulation with new seeds, and 300 mutants: a day
	@$(MAKE) --no-print-directory schedules mutants SCHEDULES=20000 MUTANTS=300

campaign-%: export TRAINJOB_CAMPAIGN = 1
campaign-%: export TRAINJOB_SIMULATION = 4000
campaign-%: $(VENV)/test.stamp
	$(PYTEST) -s $(or $(TESTS),$(campaign_$*),$(campaign_versions))

campaign-local: .venv-torch/stamp
campaign-sizes campaign-cluster campaign-trainer-oldest: .venv-torch/stamp cluster-programs
campaign-terminate campaign-kubernetes-oldest: cluster-programs
campaign-kubernetes-oldest: export TRAINJOB_TEST_OLDER = kubernetes-1.36
campaign-kserve: .venv-peers/stamp
campaign-airflow-oldest: .venv-torch/stamp
campaign-airflow-oldest campaign-kfp-oldest $(VERSIONS): PYTEST = .venv-$*/bin/python -m pytest
campaign-airflow-oldest: .venv-airflow-oldest/stamp
campaign-kfp-oldest: .venv-kfp-oldest/stamp
$(foreach each,$(VERSIONS:campaign-%=%),$(eval campaign-$(each): .venv-$(each)/stamp))

.PHONY: schedules mutants
SCHEDULES := 4000
schedules: $(VENV)/test.stamp ## random schedules of each mix of the simulation, with new seeds
	$(BIN)/python -m tests.simulation campaign --schedules $(SCHEDULES)

MUTANTS := 40
mutants: $(VENV)/test.stamp ## small changes of the product, each of which a test has to notice
	$(BIN)/python -m tests.mutants --sample $(MUTANTS)

# ---------------------------------------------------------------- records

# The tests of these parts write what they see in place of comparing it.
record_diagnosis := tests/cluster/test_diagnosis.py
record_doctor := tests/cluster/restarts/test_doctor_page.py
record_screenshot := tests/airflow/system/test_ui.py -k a_failed_task
record-%: setup packages ## write again what tests compare: record-diagnosis, record-doctor, record-screenshot
	TRAINJOB_RECORD=1 $(PYTEST) $(record_$*)

record-sdk: $(VENV)/test.stamp .venv-sdk/stamp ## record again what the Kubeflow SDK sends (tests/conformance)
	$(BIN)/python -m tests.conformance.record .venv-sdk/bin/python

.PHONY: cluster
cluster: $(VENV)/test.stamp packages ## run the test cluster until Ctrl-C, as root with a node that runs real pods
	@$(BIN)/python -m tests.testcluster $$([ "$$(id -u)" = 0 ] && echo --real-node)

.PHONY: docs
docs: .venv-docs/stamp ## build the documentation into site/; fails on a broken link
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.PHONY: bench
bench: $(VENV)/test.stamp .venv-bench/stamp .venv-oci/stamp ## measurements, one JSON object a line
	@for name in commands oci triggerer tuning waiting; do $(BIN)/python -m tests.bench.$$name || exit 1; done

# ---------------------------------------------------------------- release

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' components/trainjob/version.py)
SBOM = .venv-build/bin/cyclonedx-py environment --pyproject build/wheel/pyproject.toml --output-reproducible

# The wheel's SBOM is within the wheel, too (PEP 770). The step image's Dockerfile writes that of the image by the same lists.
.PHONY: sbom
sbom: .venv-build/stamp .venv-step/stamp ## build the wheel, and SBOMs (CycloneDX) of it and of the step image, into dist/
	@rm -rf build dist && mkdir -p build/wheel dist
	@cp -r pyproject.toml README.md LICENSE NOTICE components airflow_provider kfp_components build/wheel
	@sed -i 's/^dynamic = .*/version = "$(VERSION)"/' build/wheel/pyproject.toml
	@$(PYTHON) -m venv --without-pip build/all
	@$(UV) --python build/all/bin/python --constraints constraints/main-hashed.txt './build/wheel[all,examples]'
	@$(SBOM) --mc-type library --output-file build/wheel/trainjob.cdx.json build/all/bin/python
	@$(SBOM) --mc-type application --output-file dist/trainjob-step-$(VERSION).cdx.json .venv-step/bin/python
	@cp build/wheel/trainjob.cdx.json dist/trainjob-$(VERSION).cdx.json
	@sed -i 's/^\[tool.hatch.build.targets.wheel\]$$/&\nsbom-files = ["trainjob.cdx.json"]/' build/wheel/pyproject.toml
	@.venv-build/bin/python -m build --wheel --no-isolation --outdir dist build/wheel > build/log || { cat build/log; exit 1; }
	@rm -rf build

.PHONY: clean
clean: ## remove environments and everything that was made here
	rm -rf .venv .venv-* build dist site .demo .test-output .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis

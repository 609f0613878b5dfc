# Installs, serves and tests from a checkout; needs GNU make and a Python that .ci/find-python finds.

MODEL = demo
PORT = 8000
ARGS =
# Two workers and not as many as there are cores: each compiles most programs anew and takes 3 GiB. A file stays with one
# worker, as its tests share engines and servers.
PARALLEL = -n 2 --dist loadfile

VENV := .venv
BIN := $(VENV)/bin
CLIENTS := $(VENV)/clients

# The package's extra for this machine, "cpu" for none. The NVIDIA driver decides: CUDA 13 needs 580 or newer,
# CUDA 12 needs 525. Only where it matters, since nvidia-smi may take a second.
ifneq ($(filter install serve bench,$(MAKECMDGOALS)),)
EXTRA := $(shell driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || driver=0; \
	major=$${driver%%.*}; \
	if [ "$$major" -ge 580 ]; then echo cuda13; elif [ "$$major" -ge 525 ]; then echo cuda12; else echo cpu; fi \
	2>/dev/null)
endif

# Where the Python behind .venv was removed, nothing in it counts as installed.
$(shell [ -x $(BIN)/python ] || rm -f $(VENV)/.installed-*)

.DEFAULT_GOAL := help
.PHONY: help install serve notebook test test-all lint bench clean
# Two installs at once would break the environment.
.NOTPARALLEL:

help: ## list the targets
	@echo 'make TARGET [PYTHON=/path/to/python3.12] [EXTRA=cpu|cuda12|cuda13] [ARGS="more arguments"]'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-11s %s\n", $$1, $$2}'

install: $(VENV)/.installed-$(EXTRA) ## install into .venv, with CUDA where an NVIDIA driver works

serve: $(VENV)/.installed-$(EXTRA) ## install and serve the demo model; or MODEL=/path PORT=8123
	$(BIN)/jaxserve --model '$(MODEL)' --port $(PORT) $(ARGS)

notebook: $(VENV)/.installed-notebook ## open the notebooks in JupyterLab, which it installs
	$(BIN)/jupyter lab notebooks $(ARGS)

test: $(VENV)/.installed-test ## run the tests that need neither minutes nor a GPU
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu" $(ARGS)

test-all: $(VENV)/.installed-test $(CLIENTS)/.installed ## run all tests but those for a GPU
	JAXSERVE_CLIENTS='$(CURDIR)/$(CLIENTS)' $(BIN)/python -m pytest $(PARALLEL) -m "not gpu" $(ARGS)

lint: $(VENV)/.installed-test ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy jaxserve pallas_kernels

bench: $(VENV)/.installed-$(EXTRA) ## measure the engine without a server
	$(BIN)/python bench/offline.py $(ARGS)

clean: ## remove .venv and the caches in this tree
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@python=$$(PYTHON='$(PYTHON)' sh .ci/find-python) || exit 1; \
	echo "making $(VENV) with $$python"; "$$python" -m venv --clear $(VENV)

# Clients that the tests run have an environment of their own, since they hold back each other's dependencies.
$(CLIENTS)/.installed: tests/clients/requirements.txt $(BIN)/python
	$(BIN)/python -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -r tests/clients/requirements.txt
	if command -v npm >/dev/null; then npm install --prefix $(CLIENTS) --no-audit --no-fund openai; fi
	@touch $@

# A stamp an extra: what the name says is installed, from the pyproject.toml and constraints.txt of its time.
# An interrupted .venv, or one of uv's, may have no pip.
$(VENV)/.installed-%: pyproject.toml constraints.txt $(BIN)/python
	@$(BIN)/python -c 'import pip' 2>/dev/null || $(BIN)/python -m ensurepip
	$(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt -e '.$(if $(filter-out cpu,$*),[$*])'
	@touch $@

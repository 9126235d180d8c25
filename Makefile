# Needs Python 3.11 or newer, nothing else. `make` lists the targets.
PYTHON ?= python3
VENV ?= .venv
PY := "$(VENV)/bin/python"

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test lint wheel docs clean

help:  ## list the targets
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/p' Makefile

demo: $(VENV)/.recipes  ## install, then tune a tiny LLaVA on eight drawn tasks, by DISCO and Finetune: under 6 minutes on 2 cores
	$(PY) recipes/fcit_llava.py --train-size 500 --test-size 50 --clients 4 --sampled 2 --max-new-tokens 16 --out runs/demo

test: $(VENV)/.dev  ## install, then run the tests: under 10 minutes on 2 cores
	$(PY) -m pytest -n auto --dist loadfile

lint: $(VENV)/.dev  ## ruff, the formatter's check and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

wheel: $(VENV)/.dev  ## build dist/ and try the wheel in a clean environment outside the checkout
	rm -rf dist
	$(PY) -m build --outdir dist
	bash .ci/check_wheel $(PY) dist/*.whl

docs: $(VENV)/.docs  ## build the documentation into site/
	$(PY) -m mkdocs build --strict

clean:  ## remove the environment and everything that was built
	rm -rf "$(VENV)" build dist site ./*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One stamp for each set of extras: a second call does nothing until the pins or the settings change.
$(VENV)/.recipes $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt
	@echo "Installing lightning-fcl[$*] into $(VENV): a minute or two the first time."
	$(PYTHON) -m venv "$(VENV)"
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@

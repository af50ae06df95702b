# make compare | make test | make setup        DEVICE=gpu installs the CUDA build of FBGEMM instead of the CPU one.
DEVICE ?= cpu
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(DEVICE)
RANKS ?= 2

.PHONY: setup compare test lint
setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[train,$(DEVICE),dev]'
	$(BIN)/pip install -q --no-deps torchrec==1.8.0
	touch $@

compare: setup
	$(BIN)/python -m launch.compare --quickstart --ranks $(RANKS) --out outputs/compare

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

test: setup
	$(BIN)/python -m pytest

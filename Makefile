# make walk: a project is baked from this template and walks its six stages. make test: all tests.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
INSTALLED := $(VENV)/.takin-template-installed
BAKE := $(BIN)/python -m cookiecutter . --no-input --default-config

.PHONY: install walk test lint bench-step bench-faults bench-peers

install: $(INSTALLED)

$(INSTALLED): requirements.txt constraints.txt
	test -e $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -r requirements.txt
	touch $@

# The project's own `make walk`, in the environment that is here already: it installs the project,
# runs the stages up to the first gate that stays shut, and prints the board.
walk: install
	rm -rf walk
	$(BAKE) --output-dir walk
	$(MAKE) -C walk/takin_digits walk VENV="$(abspath $(VENV))"

test: install
	$(BIN)/python -m pytest

# The project's files are linted as a user gets them.
lint: install
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	rm -rf build/lint
	$(BAKE) --output-dir build/lint
	$(BIN)/python -m ruff check build/lint/takin_digits
	$(BIN)/python -m ruff format --check build/lint/takin_digits

bench-step: install
	$(BIN)/python bench/step.py

# Most of an hour on two cores the first time: what it found is kept below build/bench-faults.
bench-faults: install
	$(BIN)/python bench/faults.py

# After bench-faults. The peer is installed for this alone, without dependencies it never imports.
bench-peers: install
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps neural_net_checklist==1.1.0
	$(BIN)/python bench/peers.py
	$(BIN)/python bench/faults.py --page

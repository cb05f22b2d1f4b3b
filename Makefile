# `make demo` runs the main job on real data; `make test` passes every check. Both set everything up first.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Small tensors gain nothing from threads that wait for each other.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all lint bench data clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q -c constraints.txt torch
	$(RUN) -m pip install -q -c constraints.txt -e '.[dev,data]'
	touch $@

demo: $(VENV)/.installed
	$(RUN) -m experiments.studies.demo

lint: $(VENV)/.installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyrefly check

test: lint
	$(RUN) -m pytest -m "not slow" -n 2

test-all: lint
	$(RUN) -m pytest -n 2

bench: $(VENV)/.installed
	$(RUN) -m tests.benchmarks

# Fashion-MNIST as Debian packages it, for task=fashion.
data:
	apt-get update && apt-get install -y dataset-fashion-mnist

clean:
	rm -rf $(VENV) runs

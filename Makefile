# A fresh machine needs Python 3.11 with pip, and make. PYTHON=python3.12 picks another interpreter.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# What Python compiles lies there too, so that a run leaves nothing in the working tree.
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/.pycache
# Also where the environment asks for none: a hundred processes would each compile all sources for seconds.
export PYTHONDONTWRITEBYTECODE :=

# Which tests `make pytest` runs; all of them where none are named.
TESTS  ?=
MARKS  ?= not extended and not long and not zoo
# Programs that XLA may compile in `make test`; jax 0.12 compiles a few more than 0.10.
COMPILATIONS ?= 9000

# How many times as fast as by hand a network has to be in `make gate`.
LIMIT  ?= 0.9

.PHONY: help demo test test-all test-extended quick pytest ledger test-long test-newest test-versions test-zoo test-engines bench bench-newest gate accelerators check-accelerators lint docs site notebooks release clean

help:
	@echo "make demo       convert the bundled model, classify, differentiate; writes demo.png"
	@echo "make test       ruff, mypy, and the tests of all behaviour: seven to nine minutes on two cores"
	@echo "make test-all   make test, and the extended tests, more of what is expensive: make test-extended"
	@echo "make quick      the tests that a change touches, nearest first, for 75 seconds"
	@echo "make test-long  the long tests, and the official suite compiled as users compile"
	@echo "make pytest     the tests alone (TESTS=files and folders)"
	@echo "make ledger     what the tests of the last make test cost, by file, beside those of the one before"
	@echo "make test-newest    what touches JAX's interfaces, on the newest Python of this machine (minutes)"
	@echo "make test-versions  all tests on each Python from 3.11 on, and on the lowest versions allowed (hours)"
	@echo "make test-zoo   exports by many frameworks, made on the spot (hours); writes docs/exporters.md"
	@echo "make test-engines   the guide on Ray Data and Apache Beam, with killed workers (minutes)"
	@echo "make bench      measure speed and memory beside other runtimes; writes docs/performance.md (MODELS=folders)"
	@echo "make bench-newest  models and networks with the newest JAX, for its first column (after make test-newest)"
	@echo "make gate       fail where a file runs slower than the same network by hand in JAX (two minutes)"
	@echo "make accelerators   count what networks cost on a TPU and a GPU, without one; writes docs/accelerators.md"
	@echo "make check-accelerators  nineteen small rows of it against their limits (minutes)"
	@echo "make lint       ruff and mypy alone"
	@echo "make docs       write docs/operators.md, docs/figures.json and the figures on the pages"
	@echo "make site       build the documentation into .venv/site; a warning is an error"
	@echo "make notebooks  execute the notebooks and keep their outputs"
	@echo "make release    build the wheel twice, compare, and run README from it on each Python; uploads nothing"

# With the package that is installed for PYTHON, if it is; else with an editable one in VENV.
demo:
	@if $(PYTHON) -P -c "import matplotlib, onnx2jax, rich" 2> /dev/null; then $(PYTHON) -P -m onnx2jax.demo; else \
		$(PYTHON) -P -c "import onnx2jax" 2> /dev/null && \
			echo "$(PYTHON) has onnx2jax without the extra demo, $(PYTHON) -m pip install '.[demo]'; using $(VENV)"; \
		$(MAKE) --no-print-directory $(VENV)/.demo && $(BIN)/python -m onnx2jax.demo; \
	fi

# ruff and mypy run beside the tests, which fail if they compile more programs than COMPILATIONS.
test: $(VENV)/.test
	LEDGER=$(VENV)/ledger.json COMPILATIONS=$(COMPILATIONS) $(MAKE) --jobs 2 lint pytest

test-all: test
	$(MAKE) test-extended

test-extended: $(VENV)/.test
	LEDGER=$(VENV)/ledger-extended.json $(MAKE) pytest MARKS="extended and not long and not zoo"

pytest: $(VENV)/.test
	$(BIN)/python -m pytest $(TESTS) -m "$(MARKS)" --numprocesses auto --maxprocesses 8 --dist worksteal --durations 20 \
		--timeout 600 --timeout-method thread

ledger: $(VENV)/.test
	$(BIN)/python -m tests.support.ledger

quick: $(VENV)/.test
	$(BIN)/python -m tests.quick

test-long: $(VENV)/.test
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m long
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest tests/conformance/test_official.py

test-newest:
	$(PYTHON) -m tests.versions --newest

test-versions:
	$(PYTHON) -m tests.versions

test-zoo: $(VENV)/.zoo $(VENV)/jax2onnx/.installed
	-$(BIN)/python -m pytest tests/zoo -m "zoo or not zoo" --numprocesses auto --maxprocesses 4 --timeout 1200
	-$(VENV)/jax2onnx/bin/python -m pytest tests/zoo/test_zoo.py -m zoo -k jax2onnx --timeout 1200
	$(BIN)/python -m docs.make_exporters

test-engines: $(VENV)/engines/.installed
	$(VENV)/engines/bin/python -m pytest tests/face/test_engines.py

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.bench $(MODELS)
	$(if $(MODELS),$(BIN)/python -m benchmarks.passes --models $(MODELS))

bench-newest: $(VENV)/.test
	$$(ls -d $(VENV)/versions/3.* | sort -V | tail -1)/bin/python -m benchmarks.bench --newest --no-torch $(MODELS)

accelerators: $(VENV)/accelerators/.installed
	$(VENV)/accelerators/bin/python -m benchmarks.accelerators

check-accelerators: $(VENV)/accelerators/.installed
	$(VENV)/accelerators/bin/python -m benchmarks.accelerators --check

gate: $(VENV)/.test
	$(BIN)/python -m benchmarks.gate --limit $(LIMIT)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.support.house

docs: $(VENV)/.test
	$(BIN)/python -m tests.ops.test_index
	$(BIN)/python -m docs.make_operators
	$(BIN)/python -m docs.make_figures

site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir $(VENV)/site
	@echo "$(VENV)/site/index.html; with its search: python3 -m http.server --directory $(VENV)/site"

notebooks: $(VENV)/.test
	$(BIN)/python tests/face/test_notebooks.py

release: $(VENV)/.test
	$(BIN)/python -m tests.release

clean:
	rm -rf $(VENV)

# XLA's compilers for TPU and CUDA, without the libraries that running programs needs; apart, because JAX would look for
# such devices. What else the benchmarks need is that of .venv.
$(VENV)/accelerators/.installed: pyproject.toml $(VENV)/.test
	$(PYTHON) -m venv --without-pip $(VENV)/accelerators
	$(PYTHON) -m pip --python $(VENV)/accelerators/bin/python install --quiet --disable-pip-version-check --no-deps \
		$$($(BIN)/python -m benchmarks.accelerators --packages)
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
		> $$($(VENV)/accelerators/bin/python -c "import site; print(site.getsitepackages()[0])")/test.pth
	touch $@

# jax2onnx wants an older orbax than .venv has.
$(VENV)/jax2onnx/.installed: pyproject.toml
	$(PYTHON) -m venv --without-pip $(VENV)/jax2onnx
	$(PYTHON) -m pip --python $(VENV)/jax2onnx/bin/python install --quiet --disable-pip-version-check \
		--editable '.[zoo-jax]'
	touch $@

# Apache Beam wants an older protobuf than .venv has.
$(VENV)/engines/.installed: pyproject.toml
	$(PYTHON) -m venv --without-pip $(VENV)/engines
	$(PYTHON) -m pip --python $(VENV)/engines/bin/python install --quiet --disable-pip-version-check \
		--editable '.[engines]'
	touch $@

# One stamp for each set of extras, so that a second run installs nothing. The environment is made without pip and
# filled from outside, because Debian ships Python without the pieces that `venv` would put pip in with.
$(VENV)/.%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check pip --editable '.[$*]'
	touch $@

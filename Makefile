# make run    set up .venv and run the default job          make test   set up and run every test
# make check  lint, format and types                        make clean  remove what make made
# make torture  the long forms of the tests under fault (docs/reliability.md): about two hours;
#               what they print is kept in docs/results/reliability; ARGS=--short: half an hour
# make golden  run version 0.1.0 and the tree side by side on 938 cases, and name those whose bits differ (tests/golden)
# make evidence DATA=DIR  compute what is stale in docs/results, from the MNIST files in DIR; ARGS=--list says what that is
# make bench  time ours, a plain loop and a floor on this CPU; writes benchmarks/results/
# make pictures  every picture of README and docs anew (docs/images), from runs and in a browser;
#               ARGS='--only report', ARGS='--data DIR' for the one of MNIST
# make wheel  the package with its compiled parts, in dist/
# make tried PYTHON=python3.12 TORCH=2.13.0  install it there, and run what decides (docs/release.md)
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS   ?=

.PHONY: run test golden check format clean bench evidence pictures torture wheel tried
BENCHMARKS := round epoch scale evaluate steady timeline

# Each stamp records one finished installation, so that a second `make run` installs nothing.
$(VENV)/python.stamp:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fedbcd needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	touch $@

$(VENV)/run.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt src/fedbcd/algorithm/fused/chain.c
	$(PIP) -e '.[report]'
	touch $@

# Tests of pages need a browser, from the distribution; without one they are skipped, and say so.
BROWSER := apt-get install -y -qq --no-install-recommends chromium chromium-driver
$(VENV)/browser.stamp: $(VENV)/python.stamp
	@command -v chromedriver >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { $(BROWSER) || { apt-get update -qq && $(BROWSER); }; } >/dev/null 2>&1; } \
	|| echo "no headless Chromium, so tests in a browser will be skipped; as root: $(BROWSER)"
	@touch $@

$(VENV)/dev.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt src/fedbcd/algorithm/fused/chain.c
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/run.stamp

run: $(VENV)/run.stamp
	$(BIN)/fedbcd run $(ARGS)

test: $(VENV)/dev.stamp $(VENV)/browser.stamp
	OMP_NUM_THREADS=1 $(BIN)/python tests/budget.py -n auto --maxprocesses 4 --dist loadfile $(ARGS)

# ARGS='--only async' takes the cases with this in their name, ARGS=--record rewrites what `make test` compares with.
golden: $(VENV)/dev.stamp
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m golden $(ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/run.stamp
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py --out benchmarks/results/$$name.json $(ARGS) || exit 1; done

pictures: $(VENV)/dev.stamp $(VENV)/browser.stamp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/pictures.py $(ARGS)

# Interrupt it at any time: what is done is kept in runs/evidence, and it goes on from there.
DATA ?=
evidence: $(VENV)/run.stamp
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/evidence.py $(if $(DATA),--data $(DATA)) $(ARGS)

# Property tests with new examples; failing ones are kept in found/, and tried first the next time.
SEED ?= $(shell date +%s)
torture: $(VENV)/dev.stamp
	FEDBCD_EXPLORE=$(SEED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit tests/property
	FEDBCD_NETWORK=1 $(BIN)/python -m pytest tests/scenarios/test_beside_flower.py
	FEDBCD_HALF_OPEN=10000 $(BIN)/python -m pytest tests/faults/test_hostile.py
	cd tests && ../$(BIN)/python -m faultsim.raw $(ARGS)

# The package with its compiled parts in dist/; where there is no compiler it is as whole, and slower.
wheel: $(VENV)/python.stamp
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .

# One Python with one torch: the package from this clone in an environment of its own, its default job, and the tests that decide about numbers.
TORCH ?= 2.13.0
DECIDE := $(addprefix tests/,engines/test_against_oracle.py engines/test_determinism.py engines/test_stopping.py unit/test_fused.py)
tried:
	rm -rf .tried && $(PYTHON) -m venv .tried
	.tried/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) '.[report]' pytest pytest-timeout hypothesis
	.tried/bin/fedbcd --version
	.tried/bin/fedbcd run --rounds 2 --out .tried/run
	OMP_NUM_THREADS=1 .tried/bin/python -m pytest -q -p no:cacheprovider $(DECIDE) $(ARGS)

clean:
	rm -rf .tried $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

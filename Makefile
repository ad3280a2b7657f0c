# Each target does its own set-up: a virtual environment, the pinned dependencies, the default model.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NODE_CLIENT := $(VENV)/node/node_modules/openai/package.json

.PHONY: serve test check bench clean

serve: $(STAMP)
	@ls -d $${WARMSERVE_MODELS:-models}/v[1-9]* >/dev/null 2>&1 || $(BIN)/warmserve import hibari
	PATH="$(abspath $(BIN)):$$PATH" exec gunicorn

test: check system-packages $(NODE_CLIENT)
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# torch first and alone: asked for by another package, pip would choose a build with CUDA of several GB.
$(STAMP): requirements.txt setup.cfg pyproject.toml tests/apps/tone/setup.cfg tests/apps/affine/setup.cfg
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e tests/apps/tone -e tests/apps/affine
	touch $@

# The other official client of the OpenAI protocol.
$(NODE_CLIENT): $(STAMP) | system-packages
	npm install --silent --no-fund --no-audit --prefix $(VENV)/node openai@6.49.0

# What the tests run against besides Python: nginx, ffmpeg, Node, and promtool, which is in Debian's prometheus.
.PHONY: system-packages
system-packages:
	@command -v nginx >/dev/null && command -v ffmpeg >/dev/null && command -v promtool >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    nginx-light ffmpeg prometheus >/dev/null; }
	@command -v npm >/dev/null || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    nodejs npm >/dev/null; }

clean:
	rm -rf $(VENV)

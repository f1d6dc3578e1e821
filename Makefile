# `make demo` and `make test` need Python 3.11 or later, git and make; nothing else has to be installed.

# Extra arguments for pytest or the bench: make test ARGS="-k config", make bench ARGS="--quick"
ARGS ?=

UV_RUN := ./.ci/uv run --frozen
# Three files at a time: most tests wait for something, and the tests of a file may share servers.
PYTEST := $(UV_RUN) pytest -n 3 --dist loadfile

.PHONY: demo test test-system test-all test-agents lint types bench docs check sbom audit

demo:
	@$(UV_RUN) --no-dev compaction-proxy demo

# Tests of the package, in minutes.
test:
	@$(PYTEST) --ignore=tests/system --ignore=tests/bench $(ARGS)

# The promises of the whole product, as processes, on sockets, under faults; and the bench itself.
test-system:
	@$(PYTEST) tests/system tests/bench $(ARGS)

# Everything, with coverage.
test-all:
	@$(PYTEST) --cov --cov-report=term $(ARGS)

# Real agents, installed from npm and PyPI, each in sessions of 80 requests; hours for all of them. Names of agents
# (codex or codex-responses), WINDOWS (24k), SOURCES (told or learned) and COUNTINGS (prompt or sum) choose a part.
AGENTS ?= all
test-agents: export AGENTS := $(AGENTS)
test-agents: export WINDOWS := $(WINDOWS)
test-agents: export SOURCES := $(SOURCES)
test-agents: export COUNTINGS := $(COUNTINGS)
test-agents:
	@$(UV_RUN) pytest tests/system/agents $(ARGS); code=$$?; $(UV_RUN) python .ci/docs_pages.py && exit $$code

lint:
	@$(UV_RUN) ruff check
	@$(UV_RUN) ruff format --check

types:
	@$(UV_RUN) mypy

bench:
	@$(UV_RUN) python bench/throughput.py $(ARGS)

# The site of docs/ in site/: zensical, and checks that nothing is broken or loaded from elsewhere.
docs:
	@$(UV_RUN) --group docs python .ci/docs_site.py

check: lint types test

# What the image installs, with hashes, from the lock alone, in CycloneDX.
SBOM ?= dist/sbom.cdx.json
sbom:
	@mkdir -p $(dir $(SBOM))
	@./.ci/uv export --quiet --frozen --no-dev --extra=crypto --extra=fast --extra=mcp --extra=otel --extra=redis --format=cyclonedx1.5 \
		--preview-features=sbom-export --output-file=$(SBOM)

audit:
	@./.ci/audit $(ARGS)

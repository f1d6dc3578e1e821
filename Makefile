# `make demo` and `make test` need Python 3.11 or later, git and make; nothing else has to be installed.

# Extra arguments for pytest or the bench: make test ARGS="-k config", make bench ARGS="--quick"
ARGS ?=

UV_RUN := ./.ci/uv run --frozen
# A path in ARGS takes the place of the folders that a target runs otherwise.
HAS_PATH = $(filter tests%,$(ARGS))
# A file at a time for each process, because the tests of a file may share servers. There are more processes than
# the two cores of a small machine, because tests wait: those of the whole product half of the time.
PYTEST := $(UV_RUN) pytest --dist loadfile -n

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-system test-all test-agents test-hostile lint format types check bench bench-quality pages docs sbom dist audit hooks

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## run a long conversation without and with the proxy; needs no key
	@$(UV_RUN) --no-dev compaction-proxy demo

serve: ## start the proxy on 127.0.0.1:4141; ARGS="--upstream URL" sets the provider
	@$(UV_RUN) --no-dev compaction-proxy serve $(ARGS)

test: ## test the package (minutes)
	@$(PYTEST) 3 $(if $(HAS_PATH),,--ignore=tests/system --ignore=tests/bench) $(ARGS)

# In the order of the files: those with the most tests are not those that take longest, and the long ones come early.
test-system: ## test the whole product: processes, sockets, faults, and the bench itself
	@$(PYTEST) 5 --no-loadscope-reorder $(if $(HAS_PATH),,tests/bench tests/system) $(ARGS)

test-all: ## run all tests, with coverage
	@$(PYTEST) 4 --cov --cov-report=term $(ARGS)

# Real agents, installed from npm and PyPI, each in sessions of 80 requests; hours for all of them. Names of agents
# (codex or codex-responses), WINDOWS (24k), SOURCES (told or learned) and COUNTINGS (prompt or sum) choose a part.
AGENTS ?= all
test-agents: export AGENTS := $(AGENTS)
test-agents: export WINDOWS := $(WINDOWS)
test-agents: export SOURCES := $(SOURCES)
test-agents: export COUNTINGS := $(COUNTINGS)
test-agents: ## run real agents through the proxy (hours)
	@$(UV_RUN) pytest tests/system/agents $(ARGS); code=$$?; $(UV_RUN) python .ci/docs_pages.py && exit $$code

test-hostile: ## send 200,000 hostile requests while everything fails; ARGS="--requests 2000 --seed 1"
	@$(UV_RUN) python bench/hostile.py $(ARGS)

lint: ## check style and format, of the code and of the texts for users
	@$(UV_RUN) ruff check
	@$(UV_RUN) ruff format --check
	@$(UV_RUN) python .ci/check_style.py

format: ## format the code, and mend what ruff can mend
	@$(UV_RUN) ruff format
	@$(UV_RUN) ruff check --fix

types: ## check types
	@$(UV_RUN) mypy

bench: ## measure throughput compared with nginx
	@$(UV_RUN) python bench/throughput.py $(ARGS)

# ARGS may begin with a folder of conversations: make bench-quality ARGS="FOLDER --json docs/quality.json"
bench-quality: ## measure what is still at hand after compactions; ARGS="--quick" takes minutes
	@$(UV_RUN) python bench/quality/coverage.py $(ARGS)
	@$(UV_RUN) python bench/quality/probes.py $(ARGS)

pages: ## update the generated parts of config.yaml, README.md and docs/
	@$(UV_RUN) python .ci/config_reference.py
	@$(UV_RUN) python .ci/docs_pages.py

docs: ## build the documentation site in site/ and check its links
	@$(UV_RUN) --group docs python .ci/docs_site.py

check: lint types test ## lint, types and tests

SBOM ?= dist/sbom.cdx.json
sbom: ## write a CycloneDX list of the packages in the image, from the lock file
	@mkdir -p $(dir $(SBOM))
	@./.ci/uv export --quiet --frozen --no-dev --extra=crypto --extra=fast --extra=mcp --extra=otel --extra=redis --format=cyclonedx1.5 \
		--preview-features=sbom-export --output-file=$(SBOM)

dist: ## build wheel, sdist, SBOM, chart and checksums in dist/, like the release workflow
	@./.ci/dist

audit: ## check the packages of the image for known vulnerabilities (OSV)
	@./.ci/audit $(ARGS)

hooks: ## install the git hooks of .pre-commit-config.yaml
	@$(UV_RUN) pre-commit install

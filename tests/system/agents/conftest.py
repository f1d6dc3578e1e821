"""Keeps the sessions out of `make test`: `make test-agents` names them by the variable AGENTS."""

import os

collect_ignore = [] if os.environ.get("AGENTS") else ["test_agents.py"]

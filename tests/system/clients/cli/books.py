"""The tool of the growing conversation, as `llm --functions` wants it: every function here is one."""

from tests.system.clients.python import reporting


def lookup(topic: str) -> str:
    """Look something up in the books."""
    return reporting.looked_up(topic)

"""Starts the command line of the proxy for `python -m compaction_proxy`."""

from compaction_proxy.cli.main import app

if __name__ == "__main__":
    app()

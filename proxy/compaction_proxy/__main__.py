"""Runs the command-line program of the proxy if Python is started with `-m compaction_proxy`."""

from compaction_proxy.cli.main import app

if __name__ == "__main__":
    app()

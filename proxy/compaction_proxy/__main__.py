"""`python -m compaction_proxy` is `compaction-proxy`."""

from compaction_proxy.cli.main import app

if __name__ == "__main__":
    app()

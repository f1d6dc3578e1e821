"""`python -m proxy` is `compaction-proxy`."""

from proxy.cli import app

if __name__ == "__main__":
    app()

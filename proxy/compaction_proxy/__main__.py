"""Runs the command-line program of the proxy if Python is started with `-m compaction_proxy`."""

from compaction_proxy.cli.program import run_program

if __name__ == "__main__":
    run_program()

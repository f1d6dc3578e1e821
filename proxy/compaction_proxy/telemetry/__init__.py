"""Reporting: events, exchanges, usage, statistics, metrics, traces and logs."""

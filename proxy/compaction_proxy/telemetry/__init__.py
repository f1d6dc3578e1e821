"""What is reported: events, exchanges, usage, statistics, metrics, traces and logs."""

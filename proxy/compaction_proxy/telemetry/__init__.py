"""Records and reports what the proxy does: events, exchanges, usage, statistics, metrics, traces and logs."""

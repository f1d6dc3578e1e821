"""What knows nothing of conversations: caches, worker threads, formatting, names of events."""

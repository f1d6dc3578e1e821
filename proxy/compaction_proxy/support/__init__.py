"""Helpers that know nothing of conversations: caches, worker threads, formatting, names of log events."""

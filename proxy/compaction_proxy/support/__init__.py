"""Helpers that do not depend on conversations: caches, worker threads, formatting, names of log events."""

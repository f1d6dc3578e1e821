"""Keeps records in a store that may be slow, broken or unreachable."""

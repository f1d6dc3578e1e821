"""Stores records. Requests are served even if the store is slow, broken or unreachable."""

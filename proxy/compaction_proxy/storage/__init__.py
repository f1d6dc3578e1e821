"""Stores records (one value under a key) and lists. Requests are served even if the store fails."""

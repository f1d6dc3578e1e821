"""Recall: the archive of removed messages and the search in it."""

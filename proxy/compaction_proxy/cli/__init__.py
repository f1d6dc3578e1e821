"""Holds the commands of `compaction-proxy`."""

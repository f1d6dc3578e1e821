"""The commands of `compaction-proxy`."""

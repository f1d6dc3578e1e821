"""The command line `compaction-proxy` and its commands."""

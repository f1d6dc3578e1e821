"""Implements compaction-proxy, an OpenAI-compatible HTTP proxy that compacts long conversations."""

__version__ = "0.1.0"

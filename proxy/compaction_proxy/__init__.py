"""compaction-proxy: an HTTP proxy that compacts long conversations, for any OpenAI SDK."""

__version__ = "0.1.0"

"""compaction-proxy: long conversations keep fitting, behind any OpenAI SDK."""

__version__ = "0.1.0"

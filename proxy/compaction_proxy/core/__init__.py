"""The pure core: code that uses no I/O, clock, randomness, logging or environment variables.

It imports only the standard library. It reads one file, `data/cues.toml`, at import. The same input always
gives the same bytes. So the beginning of a conversation stays the same from request to request, and a
provider still finds it in its prompt cache.
"""

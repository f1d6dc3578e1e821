"""The pure core: code that uses no network, clock, randomness, logging or environment variables.

It imports only itself and the standard library. It reads one file, `data/cues.toml`, when it is imported. The
same input always gives the same output, byte for byte. So the beginning of a conversation stays the same from
request to request, and the provider still finds it in its prompt cache.
"""

"""The pure core: no I/O, clock, randomness, logging or environment variables; standard library only.

The same input gives the same bytes, so that a provider's prompt cache keeps hitting.
"""

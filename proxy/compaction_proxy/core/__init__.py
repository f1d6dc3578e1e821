"""The pure core: no I/O, no clock, no randomness, no logging and no environment; standard library only.

The same input gives the same bytes, so that a provider's prompt cache keeps hitting.
"""

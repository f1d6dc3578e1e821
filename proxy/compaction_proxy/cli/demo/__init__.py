"""The built-in demonstration: a provider that needs no key, and a scripted conversation played with it.

The tests also use this provider in place of a real one. It is a real OpenAI-compatible service on a real
socket.
"""

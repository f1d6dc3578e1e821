"""The built-in demonstration: a provider that needs no key, a scripted conversation, and the run of both.

The provider is also the project's test double: a real OpenAI-compatible service on a real socket.
"""

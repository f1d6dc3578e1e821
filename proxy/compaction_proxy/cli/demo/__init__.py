"""The built-in demonstration: a provider that needs no key, a scripted conversation, and a run of both.

The provider is also the project's test double: a real OpenAI-compatible service on a real socket.
"""

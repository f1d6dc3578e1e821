"""The built-in demo: a provider that needs no key, and a scripted conversation with this provider.

The provider serves Chat Completions on a real socket. The tests also use it in place of a real provider.
"""

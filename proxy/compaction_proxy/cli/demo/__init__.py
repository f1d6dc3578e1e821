"""The built-in demonstration: a provider that needs no key, and a scripted conversation played with it.

The tests also use this provider in place of a real one. It speaks Chat Completions on a real socket.
"""

"""Converts the bytes of requests and responses to objects of `core`, and such objects to bytes.

A wire is a format of requests and responses. Each wire has its own package: `chat`, `responses` and
`messages`. All wires share the other modules. The packages `core` and `compaction` do not depend on the
format, because `wire.Wire` has a function for each operation that differs between wires.
"""

"""Wire formats: a package for each format, and modules that all formats share.

They parse the bytes of requests and responses into objects of `core`, such as `core.message.Message`, and
encode such objects as bytes. The packages `core` and `compaction` do not depend on a format; see `wire.Wire`.
"""

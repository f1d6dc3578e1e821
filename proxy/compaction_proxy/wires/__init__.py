"""Wire formats: a package for each format, and modules that all formats share.

They parse the bytes of requests and responses into core records, and encode core records as bytes.

The core and the compaction engine do not depend on these formats. `Wire` is the interface.
"""

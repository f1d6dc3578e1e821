"""Wire formats: one package for each, and shared modules. They turn bytes into core records and back.

The core and the compaction engine know nothing of these formats; see `Wire`.
"""

"""Decodes, encodes and shortens JSON, and finds values in JSON without decoding them."""

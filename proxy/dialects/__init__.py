"""Wire formats: bytes to core records and back, one module per format."""

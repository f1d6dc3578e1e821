"""Wire formats: bytes to core records and back, one package per format, and what they share."""

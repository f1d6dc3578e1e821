"""Functions that read and write JSON piece by piece."""

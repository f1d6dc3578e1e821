"""Reading and writing JSON piece by piece."""

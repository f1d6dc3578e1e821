"""JSON that is read and written piece by piece."""

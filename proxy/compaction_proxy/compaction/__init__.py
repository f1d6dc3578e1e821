"""The use case: a request in, a request that fits out."""

"""Records over a store that may be slow, broken or away."""

"""Makes requests fit the context window of their model by compacting their conversations."""

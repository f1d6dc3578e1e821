"""Makes requests fit the context window by compacting their conversations."""

"""Replay: what strategies would do with a recorded conversation, without a provider and without a model."""

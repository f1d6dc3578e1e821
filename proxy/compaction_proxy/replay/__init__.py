"""Replay: tests strategies on recorded conversations, without a provider and without a model."""

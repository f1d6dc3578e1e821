"""Replay: plays recorded conversations to strategies, without a provider and without a model."""

"""Replay: applies strategies to recorded conversations, without a provider and without a model."""

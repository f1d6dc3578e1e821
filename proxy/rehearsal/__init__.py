"""Rehearsal: what strategies would do with a conversation, told without a provider and without a model."""

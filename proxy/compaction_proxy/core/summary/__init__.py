"""Prompts of summaries, their sections, and checks of what a model answers."""

"""Prompts of summary calls, the sections that they demand, and checks of the summaries."""

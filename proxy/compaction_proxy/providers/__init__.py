"""Counts tokens, finds context windows and prices, learns the limits of models, and requests summaries."""

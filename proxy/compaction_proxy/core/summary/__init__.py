"""Summary prompts, their sections, and checks of a summary model's answers."""

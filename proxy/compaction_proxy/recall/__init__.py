"""Archives the messages that compactions remove, and searches the archive."""

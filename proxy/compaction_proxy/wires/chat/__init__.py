"""The Chat Completions wire: `POST …/chat/completions`."""

"""The chat completions wire: `POST …/chat/completions`."""

"""Reads and writes the Chat Completions wire, the format of requests to `…/chat/completions`."""

"""Reads and writes the Messages wire, the format of requests to `…/v1/messages`."""

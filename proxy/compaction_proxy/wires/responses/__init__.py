"""Reads and writes the Responses wire, the format of requests to `…/responses`."""

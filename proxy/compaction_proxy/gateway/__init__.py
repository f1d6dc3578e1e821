"""The ASGI front of the proxy: dispatcher, identity, headers, size gate, and the endpoints for requests."""

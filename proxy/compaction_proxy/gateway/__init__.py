"""The ASGI front: dispatcher, identity, headers, size gate, and the endpoint that relays requests."""

"""The ASGI application: takes requests from clients, forwards them to upstreams, and relays the responses."""

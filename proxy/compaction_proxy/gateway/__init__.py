"""The ASGI application: it takes requests from clients, forwards them, and sends the responses."""

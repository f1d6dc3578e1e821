"""The ASGI application that receives requests from clients, forwards them to the upstream and sends responses."""

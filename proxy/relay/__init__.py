"""The relay: bytes in, bytes out, as pure ASGI."""

"""The HTTP/1.1 client that talks to upstreams."""

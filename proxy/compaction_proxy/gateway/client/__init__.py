"""The HTTP/1.1 client with which the proxy sends requests to upstreams."""

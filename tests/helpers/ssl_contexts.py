"""Keeps the SSL contexts of httpx for the process: each loads all certificates in 25 ms of processor time."""

import os
import ssl
from functools import cache
from typing import Any

import httpx
import httpx._transports.default as httpx_transports

# Which certificates a new context trusts.
VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def cache_ssl_contexts() -> None:
    """Give the same context to all who ask for the same, in this process and those that it forks."""
    create = httpx.create_ssl_context

    @cache
    def create_trusting(_: tuple[str | None, ...], *arguments: Any, **options: Any) -> ssl.SSLContext:
        return create(*arguments, **options)

    def create_ssl_context(*arguments: Any, **options: Any) -> ssl.SSLContext:
        return create_trusting(tuple(map(os.environ.get, VARIABLES)), *arguments, **options)

    for module in (httpx, httpx_transports):
        vars(module)["create_ssl_context"] = create_ssl_context

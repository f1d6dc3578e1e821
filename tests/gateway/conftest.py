"""Tests of the gateway script an upstream as the tests of the wire do."""

from tests.system.wire.conftest import chat, wire

__all__ = ["chat", "wire"]

"""Tenants and conversations get the ids of the vectors, whose digests were made by other code than ours."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.config.sections import SESSION_HEADERS
from compaction_proxy.gateway.headers import CREDENTIALS
from compaction_proxy.gateway.identity import (
    derive_conversation_id,
    derive_tenant,
    find_conversation_id,
    format_origin,
    mint_conversation_id,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "identity.json").read_text())
SECRET = b"secret"
ORIGIN = "https://api.openai.com:443"


def name(vector: dict[str, Any]) -> str:
    return str(vector["name"])


def sent(vector: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    return [(key.encode(), value.encode()) for key, value in vector["headers"]]


def by_hand(secret: bytes, *fields: bytes) -> str:
    """HMAC as RFC 2104 defines it, over fields that each follow their length."""
    key = (hashlib.sha256(secret).digest() if len(secret) > 64 else secret).ljust(64, b"\0")
    data = b"\x01" + b"".join(len(field).to_bytes(8, "big") + field for field in fields)
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key) + data).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in key) + inner).hexdigest()


@pytest.mark.parametrize("vector", VECTORS["tenant"], ids=name)
def test_a_tenant_has_the_id_of_its_vector(vector: dict[str, Any]) -> None:
    made = derive_tenant(sent(vector), vector["secret"].encode(), vector["origin"], vector["mode"])

    assert made == vector["expected"]


@pytest.mark.parametrize("vector", VECTORS["conversation"], ids=name)
def test_a_conversation_has_the_id_of_its_vector(vector: dict[str, Any]) -> None:
    made = find_conversation_id(sent(vector), SESSION_HEADERS, vector["secret"].encode(), vector["tenant"])

    assert made == vector["expected"]


@pytest.mark.parametrize("vector", VECTORS["minted"])
def test_a_minted_id_is_that_of_its_vector(vector: dict[str, Any]) -> None:
    made = mint_conversation_id(vector["secret"].encode(), vector["tenant"], bytes.fromhex(vector["prefix"]))

    assert made == vector["expected"]


SECRETS = st.binary(max_size=100)
VALUES = st.binary(max_size=12)
SHOWN = st.lists(st.tuples(st.sampled_from(sorted(CREDENTIALS)), VALUES))


@given(SECRETS, SHOWN, st.sampled_from([ORIGIN, "http://127.0.0.1:80"]))
def test_a_tenant_is_a_keyed_digest_of_its_credentials(
    secret: bytes, headers: list[tuple[bytes, bytes]], where: str
) -> None:
    told = sorted(pair for pair in headers if pair[1].strip())
    fields = [field for pair in told for field in pair]
    kind = b"credential" if told else b"anonymous"

    assert derive_tenant(headers, secret, where, "credential") == by_hand(
        secret, b"tenant", kind, where.encode(), *fields
    )


@given(SHOWN, st.randoms(use_true_random=False))
def test_the_order_of_headers_does_not_matter(headers: list[tuple[bytes, bytes]], random: Any) -> None:
    shuffled = [(key.upper(), value) for key, value in headers]
    random.shuffle(shuffled)

    assert derive_tenant(shuffled, SECRET, ORIGIN, "credential") == derive_tenant(
        headers, SECRET, ORIGIN, "credential"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([(b"api-key", b"a"), (b"api-key", b"b")], [(b"api-key", b"ab")]),
        ([(b"api-key", b"a"), (b"api-key", b"a")], [(b"api-key", b"a")]),
        ([(b"api-key", b"a")], [(b"x-api-key", b"a")]),
        ([(b"authorization", b"Bearer a")], [(b"authorization", b"Bearer A")]),
    ],
)
def test_different_credentials_are_different_tenants(
    one: list[tuple[bytes, bytes]], other: list[tuple[bytes, bytes]]
) -> None:
    assert derive_tenant(one, SECRET, ORIGIN, "credential") != derive_tenant(
        other, SECRET, ORIGIN, "credential"
    )


def test_a_gateways_header_is_no_credential() -> None:
    headers = [(b"api-key", b"a")]

    assert derive_tenant(headers, SECRET, ORIGIN, "header:api-key") != derive_tenant(
        headers, SECRET, ORIGIN, "credential"
    )


def test_an_id_does_not_show_what_it_was_made_from() -> None:
    key = derive_tenant([(b"authorization", b"Bearer sk-1")], SECRET, ORIGIN, "credential")
    found = find_conversation_id([(b"x-session-id", b"ticket")], SESSION_HEADERS, SECRET, key)

    assert len(key) == 64
    assert set(key) <= set("0123456789abcdef")
    assert found is not None
    assert found[:2] == "c_"
    assert len(found) == 26
    assert set(found[2:]) <= set("0123456789abcdef")


def test_the_same_id_of_two_tenants_is_two_conversations() -> None:
    headers = [(b"x-session-id", b"s")]

    assert find_conversation_id(headers, SESSION_HEADERS, SECRET, "t1") != find_conversation_id(
        headers, SESSION_HEADERS, SECRET, "t2"
    )


def test_an_agent_is_not_taken_for_a_part_of_its_sessions_name() -> None:
    def of(session: bytes, agent: bytes) -> str | None:
        headers = [(b"x-claude-code-session-id", session), (b"x-claude-code-agent-id", agent)]
        return find_conversation_id(headers, SESSION_HEADERS, SECRET, "t")

    assert len({of(b"ab", b"c"), of(b"a", b"bc"), of(b"abc", b""), of(b"ab", b"d")}) == 4


def test_configured_names_count_in_any_case() -> None:
    headers = [(b"x-ticket", b"s")]

    assert find_conversation_id(headers, ["X-Ticket"], SECRET, "t") == derive_conversation_id(
        SECRET, "t", "x-ticket", b"s"
    )


def test_without_names_there_is_no_conversation() -> None:
    assert find_conversation_id([(b"x-session-id", b"s")], [], SECRET, "t") is None


def test_bytes_that_are_no_utf_8_are_an_id_as_well() -> None:
    assert find_conversation_id(
        [(b"x-session-id", b"caf\xe9")], SESSION_HEADERS, SECRET, "t"
    ) == derive_conversation_id(SECRET, "t", "x-session-id", "caf\u00e9".encode())


def test_a_minted_id_is_never_that_of_a_header() -> None:
    assert mint_conversation_id(SECRET, "t", b"s") != derive_conversation_id(SECRET, "t", "", b"s")


@given(st.lists(st.tuples(st.sampled_from([b"X-Session-Id", b"thread-id"]), st.binary(max_size=300))))
def test_no_header_makes_it_fail(headers: list[tuple[bytes, bytes]]) -> None:
    found = find_conversation_id(headers, SESSION_HEADERS, SECRET, "t")

    assert found is None or len(found) == 26


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://api.openai.com/v1", ORIGIN),
        ("HTTPS://API.OpenAI.com:443", ORIGIN),
        ("http://localhost/v1?x=1#y", "http://localhost:80"),
        ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
        ("http://[::1]:8080/v1", "http://[::1]:8080"),
        ("https://[2001:DB8::1]", "https://[2001:db8::1]:443"),
        ("https://user:password@host/v1", "https://host:443"),
    ],
)
def test_an_origin_is_scheme_host_and_port(url: str, expected: str) -> None:
    assert format_origin(url) == expected


@pytest.mark.parametrize(
    "url", ["", "api.openai.com", "/v1", "ftp://host", "https://", "http://h:99999", "http://[::1"]
)
def test_what_is_no_web_address_has_no_origin(url: str) -> None:
    with pytest.raises(ValueError):
        format_origin(url)

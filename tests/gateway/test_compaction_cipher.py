"""A compaction item is readable by its tenant and this installation, and by nobody else."""

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.gateway.compaction_cipher import decrypt_item, encrypt_item

SECRET = b"s" * 32
ADDED_BYTES = 32


@given(st.binary(max_size=200), st.text())
def test_what_was_encrypted_for_a_tenant_is_read_for_it(plain: bytes, tenant: str) -> None:
    sealed = encrypt_item(SECRET, tenant, plain)
    assert len(sealed) == len(plain) + ADDED_BYTES
    assert decrypt_item(SECRET, tenant, sealed) == plain


def test_another_tenant_or_another_secret_reads_nothing() -> None:
    sealed = encrypt_item(SECRET, "t1", b"plain")
    assert decrypt_item(SECRET, "t2", sealed) is None
    assert decrypt_item(b"x" * 32, "t1", sealed) is None


@given(st.integers(0, ADDED_BYTES + 4), st.integers(1, 255))
def test_a_changed_byte_anywhere_is_noticed(place: int, change: int) -> None:
    sealed = bytearray(encrypt_item(SECRET, "t1", b"plain"))
    sealed[place] ^= change
    assert decrypt_item(SECRET, "t1", bytes(sealed)) is None


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(ciphertext: bytes) -> None:
    assert decrypt_item(SECRET, "t1", ciphertext) is None
    assert decrypt_item(SECRET, "t1", encrypt_item(SECRET, "t1", b"")[:4] + ciphertext) is None


def test_equal_items_look_different() -> None:
    assert encrypt_item(SECRET, "t1", b"plain") != encrypt_item(SECRET, "t1", b"plain")

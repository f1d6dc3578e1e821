"""Requests are compared with the one before them, of the same tenant and conversation."""

from compaction_proxy.compaction.request_loader import PreviousRequests
from compaction_proxy.core.digest import compute_message_digest, compute_prefix_digests
from compaction_proxy.core.message import Message

SEED = b"\x01"


def compare(previous: PreviousRequests, said: str, scope: str = "tenant/") -> int:
    messages = [Message("user" if word[0] == "u" else "assistant", word) for word in said.split()]
    listed = [message.with_digest_and_tokens(compute_message_digest(message), 1) for message in messages]
    return previous.record_and_count_moving_messages(
        scope, listed, compute_prefix_digests(listed, SEED), SEED
    )


def test_a_request_without_one_before_it_moves_nothing() -> None:
    assert compare(PreviousRequests(), "u1 a1 uf ok u2") == 0


def test_a_client_that_appends_moves_nothing() -> None:
    previous = PreviousRequests()
    words = [f"{kind}{k}" for k in range(15) for kind in "ua"]
    assert {compare(previous, " ".join(words[:n])) for n in range(1, 30)} == {0}


def test_moved_messages_are_counted_however_long_ago_the_request_was() -> None:
    previous = PreviousRequests()
    compare(previous, "u1 a1 uf ok u2")
    assert compare(previous, "u1 a1 u2 a2 ug ok u3") == 3
    assert compare(previous, "u1 a1 u2 a2 u3 a3 u4 a4 u5 a5 uh ok u6") == 3


def test_the_first_message_may_have_been_the_last_one() -> None:
    previous = PreviousRequests()
    compare(previous, "uf ok u1")
    assert compare(previous, "u1 a1 ug ok u2") == 3


def test_a_difference_further_front_is_a_branch() -> None:
    previous = PreviousRequests()
    compare(previous, " ".join(f"u{k} a{k}" for k in range(10)))
    assert compare(previous, "u0 a0 u1 a1 u2 a2 u9") == 0


def test_tenants_and_named_conversations_are_compared_apart() -> None:
    previous = PreviousRequests()
    compare(previous, "u1 a1 uf ok u2", "one/")
    assert compare(previous, "u1 a1 u2 a2 ug ok u3", "two/") == 0
    assert compare(previous, "u1 a1 u2 a2 ug ok u3", "one/c_1") == 0

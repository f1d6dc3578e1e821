import re

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.storage import keys

ROOT = bytes(32)
PREFIXES = [b"\x01" * 32, b"\x02" * 32]


def every_key(tenant: str, name: str) -> list[str]:
    return [
        *keys.checkpoint_keys(tenant, ROOT, "chained", PREFIXES),
        keys.archive_key(tenant, ROOT, "chained", PREFIXES[0]),
        keys.root_archives_key(tenant, ROOT),
        keys.archive_piece_key(tenant, ROOT, "0f" * 32),
        keys.round_detail_key(tenant, ROOT, "chained", PREFIXES[0]),
        keys.round_events_key(tenant, ROOT),
        keys.conversation_key(tenant, name),
        keys.events_key(tenant, name),
        keys.exchanges_key(tenant, name),
        keys.directives_key(tenant, name),
        keys.tenant_archives_key(tenant),
    ]


def everybody_s_keys() -> list[str]:
    day = "2026-11-22"
    return [
        keys.hourly_counts_key(day, 13, "w"),
        keys.statistics_writers_key(day),
        keys.recent_conversations_key(day),
        keys.live_feed_key("events"),
        keys.live_feed_key("exchanges"),
        keys.live_feed_key("listening"),
    ]


def test_the_names_of_what_is_nobody_s_are_final_too() -> None:
    nobody = "v1:{e3b0c44298fc1c149afbf4c8996fb924."
    hour = "be2df229a94ed09984a8f3af3b74c45dc686d8140220961defada14daf836876"
    day, feed = f"{nobody}fe5844ec93e17ecb29b550d2cd87dd0e}}", f"{nobody}c8bc2586cdd87cd6f970fc4262c4bbc4}}"
    assert everybody_s_keys() == [
        f"{day}:hours:{hour}",
        f"{day}:writers",
        f"{nobody}5f28eeba305535e2d4f7c409a1fdcf36}}:recent",
        f"{feed}:feed:events",
        f"{feed}:feed:exchanges",
        f"{feed}:feed:listening",
    ]
    assert {keys.derive_conversation_tenant_key(key) for key in everybody_s_keys()} == {None}


def test_the_names_are_final() -> None:
    """A stored record is lost to every running replica when one of these changes."""
    root = "v1:{be8dcefb61dddd9fbf05daa64cf5bcd6.66687aadf862bd776c8fc18b8e9f8e20}"
    conversation = "v1:{be8dcefb61dddd9fbf05daa64cf5bcd6.2ceb4df5993cba2bf0489db9b4b8ac35}"

    assert every_key("t_1", "c_1") == [
        f"{root}:checkpoint:chained:{'01' * 32}",
        f"{root}:checkpoint:chained:{'02' * 32}",
        f"{root}:archive:chained:{'01' * 32}",
        f"{root}:archives",
        f"{root}:piece:{'0f' * 32}",
        f"{root}:detail:chained:{'01' * 32}",
        f"{root}:rounds",
        f"{conversation}:conversation",
        f"{conversation}:events",
        f"{conversation}:exchanges",
        f"{conversation}:wishes",
        "v1:{be8dcefb61dddd9fbf05daa64cf5bcd6.dd9e881230ebf6e02363abdbb3566ee5}:archived",
    ]
    assert keys.conversation_tenant_key("c_1") == (
        "v1:{e3b0c44298fc1c149afbf4c8996fb924.2ceb4df5993cba2bf0489db9b4b8ac35}:tenant"
    )
    assert keys.model_limits_key("t", "https://a.b", "gpt-4o") == (
        "v1:{e3b98a4da31a127d4bde6e43033f66ba.555be87313d9e92951c45a82c20a4791}:model"
    )


@given(st.text(min_size=1), st.text())
def test_of_every_key_of_a_conversation_it_is_known_where_its_tenant_is_noted(tenant: str, name: str) -> None:
    noted = keys.conversation_tenant_key(name)

    assert keys.derive_conversation_tenant_key(keys.conversation_key(tenant, name)) == noted
    assert keys.derive_conversation_tenant_key(keys.scope_prefix(tenant, name)) == noted
    assert (
        keys.derive_conversation_tenant_key(noted),
        keys.derive_conversation_tenant_key("v1:{secret}:x"),
        keys.derive_conversation_tenant_key(""),
    ) == (None, None, None)


@given(st.text(), st.text())
def test_a_key_holds_words_of_ours_and_hex_digests_only(tenant: str, name: str) -> None:
    form = re.compile(r"v1:\{[0-9a-f]{32}\.[0-9a-f]{32}\}(:[a-z]+){1,2}(:[0-9a-f]{64})?")

    found = [
        *every_key(tenant, name),
        *everybody_s_keys(),
        keys.model_limits_key(tenant, "https://a.b", name),
    ]
    assert [key for key in found if not form.fullmatch(key)] == []


@given(st.text(), st.text(), st.text())
def test_tenants_never_share_a_key(tenant: str, other: str, name: str) -> None:
    shared = set(every_key(tenant, name)) & set(every_key(other, name))

    assert bool(shared) == (tenant == other)


def test_what_is_read_or_committed_together_shares_a_hash_tag() -> None:
    found = [keys.parse_hash_tag(key) for key in every_key("tenant", "c_1")]

    assert len(set(found[:7])) == 1
    assert len(set(found[7:11])) == 1
    assert len(set(found)) == 3


def test_no_two_keys_are_equal() -> None:
    found = [*every_key("same", "same"), *everybody_s_keys(), keys.model_limits_key("same", "same", "same")]

    assert len(set(found)) == len(found)

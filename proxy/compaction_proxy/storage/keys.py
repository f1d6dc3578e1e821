"""Builds all store keys, in the form `v1:{<scope>}:<kind>[:<rest>]`.

The part in braces is the hash tag. Keys with the same hash tag are on the same node of a cluster, where they
can be read in one round trip and committed together. A key contains hex digests and constant words, never an
id, a model's name, or text from a client. Every store and every version of the proxy uses these keys. A
change of their form must replace `v1` by `v2`. The scope is built from digests of the values in this table:

| scope | kinds |
| --- | --- |
| tenant, and first messages or first line of a message | `heads` |
| tenant and root | `checkpoint` (its lease: `…:lease`), `checkpoints`, `staged`, `archive`, `archives` |
| | `piece`, `detail`, `rounds`, `anchors` |
| tenant | `archived` (its lease: `…:lease`), `compacted` |
| tenant and conversation | `conversation`, `events`, `exchanges`, `roots`, `wishes` |
| conversation | `tenant` |
| no tenant, and a day | `hours`, `writers`, `recent` |
| no tenant | `feed`, `compacted` |
| no tenant, and the code of a link to the dashboard | `used` (only a lease) |
| tenant, upstream origin and model | `model` |

The root of a conversation is the prefix digest of its first four messages that are not fixed. A copy of a
conversation that differs only after these messages has the same root and therefore the same scope, even if
clients send different ids or none. The proxy can thus find a checkpoint by its prefix digest alone. The root
covers four messages because many conversations begin with the same first message.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

_SCOPE_HEX_DIGITS = 32
_NAME_HEX_DIGITS = 12
_ROOT_MESSAGES = 4


def _short_digest(value: str | bytes) -> str:
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return hashlib.sha256(data).hexdigest()[:_SCOPE_HEX_DIGITS]


_NOBODY = _short_digest("")


# Caches keys, because every request needs the keys of its conversation's records several times.
_cached_key = lru_cache(maxsize=1_024)


@lru_cache(maxsize=4_096)
def _build_key_start(first: str, second: str | bytes) -> str:
    """Builds the start of a key, up to the closing brace. `first` is a tenant, or empty for no tenant.

    `second` is the rest of the scope, such as the id of a conversation. `first` and `second` are digested
    separately, so that all keys of a tenant share a prefix.
    """
    return f"v1:{{{_short_digest(first)}.{_short_digest(second)}}}"


def tenant_prefix(tenant: str) -> str:
    """Returns the prefix of all keys of a tenant."""
    return f"v1:{{{_short_digest(tenant)}."


def scope_prefix(tenant: str, scope: str | bytes) -> str:
    """Returns the prefix of all keys of a conversation. `scope` is its id, or its root as bytes."""
    return f"{_build_key_start(tenant, scope)}:"


def get_conversation_root(prefixes: Sequence[bytes]) -> bytes | None:
    """Returns a conversation's root: the prefix digest of its first four messages that are not fixed.

    `prefixes` are the conversation's prefix digests. Returns None if there are fewer than four.
    """
    return prefixes[_ROOT_MESSAGES - 1] if len(prefixes) >= _ROOT_MESSAGES else None


def checkpoint_keys(tenant: str, root: bytes, strategy: str, checkpoint_ids: Iterable[bytes]) -> list[str]:
    """Returns the keys of a strategy's checkpoints with these ids (`checkpoint.build_checkpoint_id`).

    `strategy` must be the name of a built-in strategy, because the key contains the name as it is.
    """
    start = f"{_build_key_start(tenant, root)}:checkpoint:{strategy}:"
    return [start + place.hex() for place in checkpoint_ids]


@_cached_key
def checkpoint_list_key(tenant: str, root: bytes, strategy: str) -> str:
    """Returns the key of the list of the ids of a strategy's installed checkpoints."""
    return f"{_build_key_start(tenant, root)}:checkpoints:{strategy}"


def staged_checkpoints_key(tenant: str, root: bytes, strategy: str) -> str:
    """Returns the key of the list of the ids of a strategy's staged checkpoints."""
    return f"{_build_key_start(tenant, root)}:staged:{strategy}"


def lease_key(key: str) -> str:
    """Returns the key of the lease that a process holds while it writes the record under `key`."""
    return f"{key}:lease"


def archive_key(tenant: str, root: bytes, strategy: str, checkpoint_id: bytes) -> str:
    """Returns the key of a compaction's archive record, which lists the pieces of the archive.

    The messages that the compaction replaced are in the pieces. `checkpoint_id` is the id of its checkpoint.
    """
    return f"{_build_key_start(tenant, root)}:archive:{strategy}:{checkpoint_id.hex()}"


def root_archives_key(tenant: str, root: bytes) -> str:
    """Returns the key of the list of archives, of all strategies, of the conversations with this root.

    Each archive is committed together with its line in this list. See `get_conversation_root`.
    """
    return f"{_build_key_start(tenant, root)}:archives"


def archive_piece_key(tenant: str, root: bytes, piece_name: str) -> str:
    """Returns the key of a piece of an archive: several messages, or the text of one long message.

    `piece_name` is a digest of the piece's content. An archive record contains the names of its pieces.
    """
    return f"{_build_key_start(tenant, root)}:piece:{piece_name}"


@_cached_key
def tenant_archives_key(tenant: str) -> str:
    """Returns the key of a tenant's list of archives.

    The list has a line for each archive, and a line for each deletion of archives.
    """
    return f"{_build_key_start(tenant, 'archived')}:archived"


def round_detail_key(tenant: str, root: bytes, strategy: str, checkpoint_id: bytes) -> str:
    """Returns the key of a compaction's detail record (`recall.round_detail`).

    The record contains the prompts of the summary calls, and the messages that the conversation's model got
    after the compaction.
    """
    return f"{_build_key_start(tenant, root)}:detail:{strategy}:{checkpoint_id.hex()}"


def round_events_key(tenant: str, root: bytes) -> str:
    """Returns the key of the list of compaction events of the conversations with this root.

    Each event is committed together with the checkpoint of its compaction.
    """
    return f"{_build_key_start(tenant, root)}:rounds"


@_cached_key
def usage_anchors_key(tenant: str, root: bytes) -> str:
    """Returns the key of the record with the anchors of the conversations with this root."""
    return f"{_build_key_start(tenant, root)}:anchors"


@_cached_key
def conversation_key(tenant: str, conversation: str) -> str:
    """Returns the key of the record with a conversation's totals (`telemetry.usage`)."""
    return f"{_build_key_start(tenant, conversation)}:conversation"


def roots_key(tenant: str, conversation: str) -> str:
    """Returns the key of the list of the roots (`get_conversation_root`) of a conversation's checkpoints."""
    return f"{_build_key_start(tenant, conversation)}:roots"


def events_key(tenant: str, conversation: str) -> str:
    """Returns the key of the list of a conversation's events that are not compactions, such as failures."""
    return f"{_build_key_start(tenant, conversation)}:events"


@_cached_key
def conversation_heads_key(tenant: str, beginning_digest: bytes) -> str:
    """Returns the key of the list of heads of all conversations with the same beginning.

    If the client sends no conversation id, the proxy recognises the next request of a conversation by its
    head. `beginning_digest` is the prefix digest of the first messages, or the digest of a user message's
    first line.
    """
    return f"{_build_key_start(tenant, beginning_digest)}:heads"


def exchanges_key(tenant: str, conversation: str) -> str:
    """Returns the key of the list of a conversation's exchanges and their savings."""
    return f"{_build_key_start(tenant, conversation)}:exchanges"


@_cached_key
def directives_key(tenant: str, conversation: str) -> str:
    """Returns the key of the record of what people have set for a conversation, such as pins."""
    return f"{_build_key_start(tenant, conversation)}:wishes"


def conversation_tenant_key(conversation: str) -> str:
    """Returns the key of the record that contains a conversation's tenant.

    The key does not depend on the tenant, so that it can be built from the conversation's id alone.
    """
    return f"{_build_key_start('', conversation)}:tenant"


def derive_conversation_tenant_key(key: str) -> str | None:
    """Returns the `conversation_tenant_key` of the conversation to which `key` belongs.

    `key` may end after the closing brace. Returns None for a key without a tenant. If `key` belongs to a
    model or to a root (`get_conversation_root`), which this function cannot distinguish from a conversation,
    the result is a key under which nothing is stored.
    """
    first, dot, second = parse_hash_tag(key).partition(".")
    return f"v1:{{{_NOBODY}.{second}}}:tenant" if dot and first != _NOBODY else None


def day_statistics_prefix(day: str) -> str:
    """Returns the prefix of the keys of a day's statistics. `day` is a date in UTC, such as `2026-11-22`."""
    return f"{_build_key_start('', f'day {day}')}:"


def hourly_counts_key(day: str, hour: int, writer: str) -> str:
    """Returns the key of the record with the counts of one process for one hour (0 to 23) of a day.

    `writer` is the random id of the process. No other process writes this record.
    """
    return f"{day_statistics_prefix(day)}hours:{hashlib.sha256(f'{hour} {writer}'.encode()).hexdigest()}"


def statistics_writers_key(day: str) -> str:
    """Returns the key of the list of processes that have written statistics of a day."""
    return f"{day_statistics_prefix(day)}writers"


def recent_conversations_key(day: str) -> str:
    """Returns the key of the list of conversations that were used on a day."""
    return f"{_build_key_start('', f'recent {day}')}:recent"


def live_feed_key(kind: str) -> str:
    """Returns a key of the live feed, in which people follow the events and exchanges of all processes.

    `kind` is `events` or `exchanges` for the list of these items, or `listening` for the record of the time
    until which somebody follows the feed. Processes write their exchanges to the feed only until that time.
    """
    return f"{_build_key_start('', 'feed')}:feed:{kind}"


@_cached_key
def compacted_conversations_key(tenant: str) -> str:
    """Returns the key of the list of a tenant's compacted conversations.

    The proxy parses the requests of these conversations even if they are small enough to pass unparsed.
    """
    return f"{_build_key_start(tenant, 'compacted')}:compacted"


def compacted_tenants_key() -> str:
    """Returns the key of the list of all tenants with compacted conversations."""
    return f"{_build_key_start('', 'compacted')}:compacted:tenants"


def compacted_changes_key() -> str:
    """Returns the key of the list of the newest changes to all tenants' lists of compacted conversations."""
    return f"{_build_key_start('', 'compacted')}:compacted:changes"


def sign_in_code_key(code: str) -> str:
    """Returns the key of the lease that marks the code of a link to the dashboard as used."""
    return f"{_build_key_start('', f'code {code}')}:used"


@_cached_key
def derive_client_key_name(tenant: str) -> str:
    """Returns the name of a tenant's client key in statistics: `k_` and 12 hex digits."""
    return f"k_{_short_digest(tenant)[:_NAME_HEX_DIGITS]}"


@_cached_key
def model_limits_key(tenant: str, origin: str, model: str) -> str:
    """Returns the key of the record of facts about a model at an upstream, such as its context window.

    The proxy learns these facts from the tenant's requests. `origin` is the scheme, host and port of the
    upstream.
    """
    return f"{_build_key_start(tenant, origin + ' ' + model)}:model"


def discovered_windows_key(origin: str) -> str:
    """Returns the key of the list of context windows that an upstream has reported, for people to see.

    The list depends on no tenant. `origin` is the scheme, host and port of the upstream.
    """
    return f"{_build_key_start('', f'windows {origin}')}:windows"


def parse_hash_tag(key: str) -> str:
    """Returns the text in a key's braces; empty if the key has none."""
    return key.partition("{")[2].partition("}")[0]

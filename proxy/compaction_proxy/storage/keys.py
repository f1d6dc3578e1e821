"""The names of everything in a store: `v1:{<scope>}:<kind>[:<rest>]`.

What stands in braces is the hash tag: keys that share it live on one node of a cluster, where they can be
read in one round trip and committed at once. A key holds hex digests and words of ours, never an id, the
name of a model, or text as it came. Every store and every version keeps these names; a change needs a `v2`.

| scope | kinds |
| --- | --- |
| tenant and first message, or root | `heads` |
| tenant and root | `checkpoint` (its lease: `…:lease`), `checkpoints`, `staged`, `archive`, `archives` |
| | `piece`, `detail`, `rounds`, `anchors` |
| tenant | `archived` (its lease: `…:lease`), `compacted` |
| tenant and conversation | `conversation`, `events`, `exchanges`, `roots`, `wishes` |
| conversation | `tenant` |
| nobody, and a day | `hours`, `writers`, `recent` |
| nobody | `feed`, `compacted` |
| tenant, upstream origin and model | `model` |

The root of a conversation is the prefix digest of its first four non-privileged messages. Branches, edits and
regenerations further on keep it, so they share a scope whatever ids they come with, and a checkpoint is found
by its prefix digest alone. Of four messages, because many conversations begin with the same one.
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


# The keys of what every request looks at are asked for several times in each.
_cached_key = lru_cache(maxsize=1_024)


@lru_cache(maxsize=4_096)
def _build_key_start(first: str, second: str | bytes) -> str:
    """Start of a key. The first digest stands alone, so that all keys of a tenant share a beginning."""
    return f"v1:{{{_short_digest(first)}.{_short_digest(second)}}}"


def tenant_prefix(tenant: str) -> str:
    """What every key of a tenant begins with."""
    return f"v1:{{{_short_digest(tenant)}."


def scope_prefix(tenant: str, scope: str | bytes) -> str:
    """What every key of one of a tenant's scopes begins with: of a root, or of a conversation."""
    return f"{_build_key_start(tenant, scope)}:"


def conversation_root(prefixes: Sequence[bytes]) -> bytes | None:
    """The root of a conversation with these prefix digests; None if it is too short to have one."""
    return prefixes[_ROOT_MESSAGES - 1] if len(prefixes) >= _ROOT_MESSAGES else None


def checkpoint_keys(tenant: str, root: bytes, strategy: str, checkpoint_ids: Iterable[bytes]) -> list[str]:
    """Records: the checkpoints of a strategy (one of our row names) at these places (`checkpoint.place`)."""
    start = f"{_build_key_start(tenant, root)}:checkpoint:{strategy}:"
    return [start + place.hex() for place in checkpoint_ids]


@_cached_key
def checkpoint_list_key(tenant: str, root: bytes, strategy: str) -> str:
    """List: the places of a strategy's checkpoints, committed at once with each."""
    return f"{_build_key_start(tenant, root)}:checkpoints:{strategy}"


def staged_checkpoints_key(tenant: str, root: bytes, strategy: str) -> str:
    """List: the places of checkpoints made ahead of need, which no request has been given yet."""
    return f"{_build_key_start(tenant, root)}:staged:{strategy}"


def lease_key(key: str) -> str:
    """The lease on making the record under `key`."""
    return f"{key}:lease"


def archive_key(tenant: str, root: bytes, strategy: str, checkpoint_id: bytes) -> str:
    """Record: which pieces hold the original messages that the checkpoint at this place replaced."""
    return f"{_build_key_start(tenant, root)}:archive:{strategy}:{checkpoint_id.hex()}"


def root_archives_key(tenant: str, root: bytes) -> str:
    """List: where the archives of a root are, of all strategies; committed at once with each."""
    return f"{_build_key_start(tenant, root)}:archives"


def archive_piece_key(tenant: str, root: bytes, name: str) -> str:
    """Record: messages, or one text, that archives of a root name by a digest of the content."""
    return f"{_build_key_start(tenant, root)}:piece:{name}"


@_cached_key
def tenant_archives_key(tenant: str) -> str:
    """List: the archives that a tenant has, and those that it has no more."""
    return f"{_build_key_start(tenant, 'archived')}:archived"


def round_detail_key(tenant: str, root: bytes, strategy: str, checkpoint_id: bytes) -> str:
    """Record: what making the checkpoint at this place took, and what the model saw once it was made."""
    return f"{_build_key_start(tenant, root)}:detail:{strategy}:{checkpoint_id.hex()}"


def round_events_key(tenant: str, root: bytes) -> str:
    """List: the events of finished rounds, committed at once with their checkpoints."""
    return f"{_build_key_start(tenant, root)}:rounds"


@_cached_key
def usage_baselines_key(tenant: str, root: bytes) -> str:
    """Record: what providers last counted of the conversations with this root."""
    return f"{_build_key_start(tenant, root)}:anchors"


@_cached_key
def conversation_key(tenant: str, conversation: str) -> str:
    """Record: what is known of a conversation; its totals, and the root it was last seen with."""
    return f"{_build_key_start(tenant, conversation)}:conversation"


def roots_key(tenant: str, conversation: str) -> str:
    """List: the roots under which a conversation has checkpoints."""
    return f"{_build_key_start(tenant, conversation)}:roots"


def events_key(tenant: str, conversation: str) -> str:
    """List: events of a conversation that belong to no checkpoint, such as failures."""
    return f"{_build_key_start(tenant, conversation)}:events"


@_cached_key
def conversation_heads_key(tenant: str, beginning: bytes) -> str:
    """List: how far the conversations have come that begin so and whose clients send no id."""
    return f"{_build_key_start(tenant, beginning)}:heads"


def exchanges_key(tenant: str, conversation: str) -> str:
    """List: the exchanges of a conversation, as figures."""
    return f"{_build_key_start(tenant, conversation)}:exchanges"


@_cached_key
def directives_key(tenant: str, conversation: str) -> str:
    """Record: what people have asked of a conversation."""
    return f"{_build_key_start(tenant, conversation)}:wishes"


def conversation_tenant_key(conversation: str) -> str:
    """Record: whose a conversation is, for those who know nothing but its id. It stands in nobody's scope."""
    return f"{_build_key_start('', conversation)}:tenant"


def derive_tenant_key(key: str) -> str | None:
    """Returns the `conversation_tenant_key` to which a tenant's key, or the beginning of one, belongs.

    Of a root or a model, whose scopes look the same, it is a name that nothing has. None for other keys.
    """
    first, dot, second = parse_hash_tag(key).partition(".")
    return f"v1:{{{_NOBODY}.{second}}}:tenant" if dot and first != _NOBODY else None


def day_prefix(day: str) -> str:
    """What the statistics of one day (`2026-11-22`, UTC) begin with. They stand in nobody's scope."""
    return f"{_build_key_start('', f'day {day}')}:"


def hours_key(day: str, hour: int, writer: str) -> str:
    """Record: what one process has counted in one hour of a day, 0 to 23; nobody else writes it."""
    return f"{day_prefix(day)}hours:{hashlib.sha256(f'{hour} {writer}'.encode()).hexdigest()}"


def writers_key(day: str) -> str:
    """List: the processes that have counted something on a day."""
    return f"{day_prefix(day)}writers"


def recent_conversations_key(day: str) -> str:
    """List: conversations that were in use on a day."""
    return f"{_build_key_start('', f'recent {day}')}:recent"


def feed_key(kind: str) -> str:
    """List (`events`, `exchanges`) or record (`listening`) of the live feed. It stands in nobody's scope."""
    return f"{_build_key_start('', 'feed')}:feed:{kind}"


@_cached_key
def compacted_conversations_key(tenant: str) -> str:
    """List: the conversations of a tenant that have rounds although their requests may be small."""
    return f"{_build_key_start(tenant, 'compacted')}:compacted"


def compacted_tenants_key() -> str:
    """List: the tenants that have such conversations. It stands in nobody's scope."""
    return f"{_build_key_start('', 'compacted')}:compacted:tenants"


def compacted_changes_key() -> str:
    """List: the newest changes of those lists."""
    return f"{_build_key_start('', 'compacted')}:compacted:changes"


@_cached_key
def client_key_name(tenant: str) -> str:
    """What a tenant, which is a client's key, is called in statistics: `k_` and 12 hex digits."""
    return f"k_{_short_digest(tenant)[:_NAME_HEX_DIGITS]}"


@_cached_key
def model_limits_key(tenant: str, origin: str, model: str) -> str:
    """Record: what a tenant's requests have taught of a model at an upstream, such as its window."""
    return f"{_build_key_start(tenant, origin + ' ' + model)}:model"


def parse_hash_tag(key: str) -> str:
    """What stands in a key's braces."""
    return key.partition("{")[2].partition("}")[0]

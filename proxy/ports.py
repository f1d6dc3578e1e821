"""What the use cases ask of the outside world.

Adapters implement these; one contract suite runs on every adapter of a port.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from proxy.core.message import Message


@dataclass(frozen=True, slots=True)
class Record:
    """One value to be kept.

    Attributes:
        key: Where; records that are read or committed together share the part of their key in `{}`.
        value: An envelope (`proxy.storage.records`), opaque to a store.
        ttl_s: Seconds until it is forgotten, infinite for never; reading it does not prolong it.
    """

    key: str
    value: bytes
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One line to be added to a bounded list.

    Attributes:
        key: Which list.
        value: The line, opaque to a store.
        ttl_s: Seconds until the whole list is forgotten, counted from its newest line.
        keep: Number of newest lines that stay.
    """

    key: str
    value: bytes
    ttl_s: float
    keep: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to do one piece of work, for a while.

    Attributes:
        key: Which work.
        fence: Rises with every holder of this key, so that one who lost the lease can be told apart.
    """

    key: str
    fence: int


class Store(Protocol):
    """Where derived data is kept. Losing it costs a summary, never an answer.

    Every method raises `StoreUnavailable` when the store cannot do what was asked, and may take as long as
    the store takes: deadlines are the caller's. Keys that are written together share one hash tag; keys that
    are read together may have many, at the price of a round trip to each node of a cluster.
    """

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values under `keys`, in their order; None for what is absent or expired.

        Without keys nothing is read, but a store that cannot be reached says so.
        """
        ...

    async def commit(
        self, claim: Record, also: Sequence[Record | Entry] = (), *, lease: Lease | None = None
    ) -> bytes | None:
        """Write everything, all or nothing, unless `claim.key` is taken.

        Returns the value that now stands under `claim.key`: ours, or the one that was there first, in which
        case nothing was written. So whoever commits first decides the bytes that all use. None where nothing
        stands there and nothing was written, because `lease` is no longer ours.
        """
        ...

    async def write(self, items: Sequence[Record | Entry]) -> None:
        """Write everything, all or nothing, over what was there."""
        ...

    async def tail(self, key: str, limit: int) -> list[bytes]:
        """The newest `limit` lines of a list, oldest first."""
        ...

    async def acquire(self, key: str, ttl_s: float) -> Lease | None:
        """A lease on `key`, unless another holds one that has not expired.

        It has nothing to do with a record of the same key, but is kept with it: a commit names a lease whose
        key shares the hash tag.
        """
        ...

    async def renew(self, lease: Lease, ttl_s: float) -> bool:
        """Prolong a lease. False if it is no longer ours."""
        ...

    async def release(self, lease: Lease) -> None:
        """Give a lease back. Nothing happens if it is no longer ours."""
        ...

    async def delete(self, prefix: str) -> int:
        """Forget every record and list whose key begins with `prefix`; how many.

        With them, and not counted, go the notes of whose they are (`core.keys.owner_key`). Leases on such
        keys end, too, so that nothing that is being made now comes back. May take as long as there are keys.
        """
        ...

    async def close(self) -> None:
        """Let go of files and connections. Calling it twice does no harm."""
        ...


class TokenCounter(Protocol):
    """Counts the tokens of a text. Never fails: what cannot be counted is estimated from its length."""

    def count(self, text: str, model: str) -> int:
        """Tokens of `text` for `model`, before calibration. Thread-safe; about one second per megabyte."""
        ...

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        """Tokens of each text, exactly as `count` gives them, at a lower price beside busy threads."""
        ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """The very conversation that a summary is wanted of, for a call that continues it.

    Attributes:
        raw: The client's request body; all that shapes the provider's cached prefix is taken from it.
        messages: The messages as they would be forwarded, valid as a list.
    """

    raw: bytes = field(repr=False)
    messages: tuple[Message, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class SummaryCall:
    """One request to a summary model.

    Attributes:
        url: Absolute URL of a chat completions endpoint.
        headers: Credentials and whatever else the call needs.
        model: The model's name.
        system: Instructions; byte-identical in every call of a strategy, so that the provider's cache hits.
            Without meaning where there is a `conversation`.
        prompt: The data to summarise, fenced; behind a `conversation`, what is wanted of it.
        max_tokens: Upper bound for the answer; what a model thinks before it comes on top.
        temperature: 0..2, or None to leave it out.
        cache_key: The provider's key for its prompt cache; empty to leave it out.
        conversation: What the call continues; None where `system` and `prompt` are all of it.
    """

    url: str
    headers: Mapping[str, str] = field(repr=False)
    model: str
    system: str = field(repr=False)
    prompt: str = field(repr=False)
    max_tokens: int
    temperature: float | None
    cache_key: str = ""
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True)
class SummaryAnswer:
    """What a summary model said, not yet validated.

    Attributes:
        text: The answer's text; empty if there was none.
        finish_reason: As the provider named it; empty if it did not.
        called_tools: Whether it tried to call a tool.
        refused: Whether it carried a refusal.
        prompt_tokens: From `usage`; 0 if unknown.
        completion_tokens: From `usage`; 0 if unknown.
        cached_tokens: From `usage`, those of the prompt that the provider had cached; 0 if unknown.
    """

    text: str
    finish_reason: str = ""
    called_tools: bool = False
    refused: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class SummaryModel(Protocol):
    """A model that writes summaries."""

    async def ask(self, call: SummaryCall) -> SummaryAnswer:
        """One answer, without retries beyond those for refused parameters. The deadline is the caller's.

        Raises:
            SummaryFailed: The model could not be asked, or what came back is no chat completion. Its
                `reason` is one of `http-NNN`, `overflow`, `unknown-model`, `unreachable`, `garbage`; with
                `http-429` and `http-503` it may say when to ask again.
        """
        ...


class Discovery(Protocol):
    """Asks an upstream what it says of itself."""

    async def window(self, base_url: str, headers: Mapping[str, str], model: str) -> int | None:
        """The largest input of a model, in tokens; None if the upstream does not say, or not in time."""
        ...


class HttpRequest(NamedTuple):  # made for each request: a dataclass costs four times as much
    """One request as it goes onto the wire.

    Attributes:
        method: In capitals.
        origin: `scheme://host[:port]`, in lower case.
        target: The request target, byte for byte.
        headers: Fields in their order, without host and without what frames the body: those follow from
            the origin and the body.
        body: What is sent; a stream cannot be sent twice.
        length: Declared length of a stream in bytes; None sends it chunked. Without meaning for bytes.
        connect_s: Seconds until a connection must stand, None for no limit.
        silence_s: Seconds that the other side may be silent, before the first byte or later; None for ever.
    """

    method: str
    origin: str
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes | AsyncIterator[bytes]
    length: int | None = None
    connect_s: float | None = None
    silence_s: float | None = None


class HttpResponse(Protocol):
    """An answer whose headers have come, and whose body comes as it is read."""

    @property
    def status(self) -> int:
        """As it came."""
        ...

    @property
    def reason(self) -> bytes:
        """The phrase behind the status."""
        ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Fields in their order, as they came."""
        ...

    async def read(self) -> bytes:
        """What has come of the body since the last call, waiting for at least a byte; empty at its end.

        Raises:
            httpx.TransportError: The body was cut, or its sender silent for too long; every byte that did
                arrive has been given before. A cancellation ends the exchange.
        """
        ...

    async def aclose(self) -> None:
        """End the exchange. Where the body is not at its end, the other side sees a hang-up at once."""
        ...


class HttpEngine(Protocol):
    """What sends requests: bytes go out and come in exactly as they are, and nothing is followed."""

    async def send(self, request: HttpRequest) -> HttpResponse:
        """Send a request; comes back as soon as status and headers of the answer are known.

        A request whose body is bytes may go over a connection that has served before, and is sent once more
        over a new one if that turns out to be dead before one byte came back. When the caller is cancelled,
        the exchange ends at once.

        Raises:
            httpx.TransportError: `ConnectError`, `ConnectTimeout`, `ReadTimeout`, `ReadError`, `WriteError`,
                `ProxyError`, `UnsupportedProtocol`, `RemoteProtocolError`, or `LocalProtocolError` for a head
                that holds CR, LF or NUL. What the body raises ends the exchange, as itself or `WriteError`.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection. Calling it twice does no harm."""
        ...

"""The sections of the configuration: immutable pydantic classes that give every key its unit and default.

The names of the keys never change, because configuration files of users contain them. Some keys are reserved
for later versions. In this version, such a key accepts only one value (`OnlyValue`).
"""

from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from compaction_proxy.config.strategies import StrategiesSection
from compaction_proxy.config.types import (
    STRICT,
    AccessLog,
    AutoOrFalse,
    BasePath,
    Duration,
    HeaderName,
    HttpUrl,
    HttpUrlIfAny,
    Key,
    Number,
    OnlyValue,
    Percent,
    Positive,
    Seconds,
    SecondsOrNever,
    StoreUrl,
    Tenant,
    parse_duration,
    parse_origin,
    reject_boolean,
)
from compaction_proxy.core.cost.price import ModelPrice, PriceTier
from compaction_proxy.core.strategies import DEFAULT_STRATEGY, STRATEGIES, StandInRole
from compaction_proxy.core.trigger import TRIGGER_FIELDS

# The names of the wires. Requests of the wire `chat` always go to the provider in `upstream`. Each other wire
# may have a provider of its own (`upstream.wires`).
RESPONSES_WIRE, MESSAGES_WIRE = "responses", "messages"
WIRES = ("chat", RESPONSES_WIRE, MESSAGES_WIRE)
OPENAI_URL = "https://api.openai.com"
ANTHROPIC_URL = "https://api.anthropic.com"


def _is_openai_url(url: str) -> bool:
    return parse_origin(url) == parse_origin(OPENAI_URL)


class WireSection(BaseModel):
    """The provider for requests of one wire. A key that is not set takes its value from `upstream`."""

    model_config = STRICT
    base_url: HttpUrl | None = None
    """Base URL of the provider for this wire; null: `upstream.base_url`."""
    api_key: Key = SecretStr("")
    """Key sent there in place of the client's; empty: `upstream.api_key` where the origin is the same."""


class WiresSection(BaseModel):
    """The providers for single wires. Requests for chat completions always go to `upstream.base_url`."""

    model_config = STRICT
    responses: WireSection = WireSection()
    """Requests to `…/responses`."""
    messages: WireSection = WireSection()
    """Requests to `…/v1/messages`, and all with `anthropic-version`; to Anthropic where OpenAI has no key."""


class UpstreamSection(BaseModel):
    """The provider to which requests are forwarded."""

    model_config = STRICT
    base_url: HttpUrl = "https://api.openai.com/v1"
    """Base URL of the provider; the client's path is appended, a shared `/v1` is taken once."""
    api_key: Key = SecretStr("")
    """Key sent upstream in place of the client's; empty: the client's own passes through."""
    engine: Literal["native", "aiohttp"] = "native"
    """Only `native`. `aiohttp` means the same, with a warning, until version 0.2."""
    timeout_s: Seconds = 600
    """Longest silence of the upstream, in seconds."""
    stream_usage: Annotated[str, OnlyValue("observe")] = "observe"
    """Whether `usage` on streams is only observed."""
    lower_max_tokens: AutoOrFalse = "auto"
    """`auto`: `max_tokens` is lowered where the upstream refuses its sum with the prompt; `false`: never."""
    responses_compact: Literal["auto", "relay", "answer"] = "auto"
    """Who compacts if a client asks: `relay` the upstream, `answer` the proxy, `auto` the one that can."""
    prices: Literal["auto", "list"] = "auto"
    """`list`: list prices also where the upstream is private, as a gateway is; `auto`: not of those."""
    wires: WiresSection = WiresSection()
    """Providers of single wires."""

    def get_provider(self, wire: str) -> tuple[str, str]:
        """Returns the base URL and the key for a wire.

        Without a key of the wire's own, the key is that of `upstream` if the base URL has the same origin as
        `upstream.base_url`. An empty key means that the proxy sends the client's own key.
        """
        wire_section = getattr(self.wires, wire, None) or WireSection()
        key = self.api_key.get_secret_value()
        base_url = wire_section.base_url or self.base_url
        wire_key = wire_section.api_key.get_secret_value()
        if (
            wire_section.base_url is None
            and wire == MESSAGES_WIRE
            and (wire_key or not key)
            and _is_openai_url(base_url)
        ):
            base_url = ANTHROPIC_URL  # OpenAI does not offer this wire
        is_same_origin = parse_origin(base_url) == parse_origin(self.base_url)
        return base_url, wire_key or (key if is_same_origin else "")


Hops = Annotated[int, BeforeValidator(reject_boolean), Field(ge=1, le=16)]
RecalledTokens = Annotated[int, BeforeValidator(reject_boolean), Field(ge=50, le=2_000)]
Share = Annotated[float, BeforeValidator(reject_boolean), Field(ge=0, le=1, allow_inf_nan=False)]


class RecallSection(BaseModel):
    """How the model gets text of removed messages: with a search tool, or as text in its requests."""

    model_config = STRICT
    tool: Literal["none", "inject", "always"] = "none"
    """Offers the model a search of what was removed, once something was (`inject`) or `always`."""
    max_hops: Hops = 4
    """How often, 1 to 16, one answer may go on after searches; up to 8 of them are run each time."""
    auto: Literal["none", "inject"] = "none"
    """`inject` places what matches the latest user message right before it."""
    auto_tokens: RecalledTokens = 500
    """Tokens that what `auto` places may take, 50 to 2,000."""
    auto_score: Share = 0.25
    """How well a passage must match for `auto`, 0 to 1; the lower, the more is beside the point."""


# Maximum configurable price, in dollars per million tokens: one dollar for each token. Much higher prices
# could make sums infinite, and JSON has no infinity.
MAX_DOLLARS = 1_000_000
Dollars = Annotated[float, BeforeValidator(reject_boolean), Field(ge=0, le=MAX_DOLLARS)]
PRICE_SOURCE = "configuration"


class SurchargeSection(BaseModel):
    """Prices of requests above a certain size. They apply to all tokens of such a request."""

    model_config = STRICT
    above_tokens: Positive
    """Input tokens above which a request costs more."""
    input: Dollars
    """Dollars for a million input tokens; more than without the surcharge."""
    cached: Dollars | None = None
    """The same for tokens that the provider had cached; null: as many times more as `input`."""
    cache_write: Dollars | None = None
    """The same for tokens that it puts into its cache; null: as many times more as `input`."""
    output: Dollars | None = None
    """Dollars for a million output tokens; null: no more than without."""


class PricesSection(BaseModel):
    """Prices of a model, in dollars for a million tokens."""

    model_config = STRICT
    input: Dollars
    """Dollars for a million input tokens."""
    cached: Dollars | None = None
    """The same for tokens that the provider had cached; null: as `input`."""
    cache_write: Dollars | None = None
    """The same for tokens that it puts into its cache; null: as `input`."""
    output: Dollars
    """Dollars for a million output tokens."""
    surcharge: SurchargeSection | None = None
    """`above_tokens`, `input`, `cached`, `cache_write`, `output` of larger requests; null: none."""

    @field_validator("surcharge")
    @classmethod
    def _check_surcharge(
        cls, surcharge: SurchargeSection | None, info: ValidationInfo
    ) -> SurchargeSection | None:
        """Returns a surcharge unchanged if its input price is higher than the price without surcharge.

        Raises:
            ValueError: If the input price is not higher.
        """
        without = info.data.get("input")
        if surcharge is not None and without is not None and surcharge.input <= without:
            raise ValueError(f"its input costs {surcharge.input:g}, which is not above {without:g}")
        return surcharge

    def to_price(self) -> ModelPrice:
        """Returns the prices as a `ModelPrice`, with the configuration as their source."""
        return ModelPrice(tuple(self._build_tiers()), PRICE_SOURCE)

    def _build_tiers(self) -> list[PriceTier]:
        cached, written = (self.input if each is None else each for each in (self.cached, self.cache_write))
        base_tier = PriceTier(0, self.input, cached, written, self.output)
        surcharge = self.surcharge
        if surcharge is None:
            return [base_tier]
        times = surcharge.input / self.input if self.input else 1.0
        return [
            base_tier,
            PriceTier(
                above=surcharge.above_tokens,
                input=surcharge.input,
                cached=cached * times if surcharge.cached is None else surcharge.cached,
                cache_write=written * times if surcharge.cache_write is None else surcharge.cache_write,
                output=self.output if surcharge.output is None else surcharge.output,
            ),
        ]


_MEGABYTE = 1_000_000


class ArchiveSection(BaseModel):
    """How much text of removed messages is kept. Beyond these limits, the proxy deletes the oldest text."""

    model_config = STRICT
    conversation_mb: Number = 16
    """Megabytes of text of one conversation with its branches, before compression; 0: no bound."""
    tenant_mb: Number = 512
    """Megabytes of text of all that a tenant has, likewise; looked at once a minute. 0: no bound."""

    @property
    def conversation_bytes(self) -> int:
        """`conversation_mb` in bytes."""
        return self.conversation_mb * _MEGABYTE

    @property
    def tenant_bytes(self) -> int:
        """`tenant_mb` in bytes."""
        return self.tenant_mb * _MEGABYTE


SESSION_HEADERS = (
    "x-session-id", "x-litellm-session-id", "helicone-session-id", "x-dynamo-session-id", "x-bf-session-id",
    "x-claude-code-session-id", "x-opencode-session", "x-session-affinity", "x-openwebui-chat-id",
    "x-conversation-id", "x-chat-id", "x-coder-chat-id", "x-kilocode-taskid", "x-mux-workspace-id",
    "x-client-session-id", "x-interaction-id", "x-sm-conversation-id", "thread-id", "session-id",
    "session_id", "conversation_id", "x-litellm-trace-id", "x-portkey-trace-id", "baggage",
)  # fmt: skip
# Minimum of `max_inflight_bytes`, in bytes. The largest allowed body of a call to the MCP tools has this
# size.
MIN_INFLIGHT_BYTES = 1_048_576


# Value of `server.admin_key` with which clients on this machine need no key.
NO_ADMIN_KEY = "none"


class ServerSection(BaseModel):
    """Where clients reach the proxy, who may use it, and the limits for their requests."""

    model_config = STRICT
    host: str = "127.0.0.1"
    """Address to listen on; one that is not loopback should have an `admin_key`."""
    port: Annotated[Number, Field(le=65_535)] = 4141
    """TCP port; 0 takes a free one."""
    unix_socket: str | None = None
    """Path to listen on instead of host and port, for its owner and group; null: TCP."""
    tls_certificate: str | None = None
    """File of a certificate chain in PEM, to serve HTTPS; null: plain HTTP."""
    tls_key: str | None = None
    """File of its private key in PEM, without a password."""
    base_path: BasePath = ""
    """Prefix of our own paths (health, metrics, admin); empty: none."""
    admin_key: Key = SecretStr("")
    """Bearer key of the admin API and UI; empty: the proxy makes one on loopback; `none`: open there."""
    secret: SecretStr = SecretStr("")
    """Key of the digests that separate tenants; empty: made once and kept beside the store."""
    previous_secrets: tuple[Key, ...] = ()
    """Earlier values of `secret`: compaction items that were sealed with one of them are still opened."""
    client_keys: tuple[Key, ...] = ()
    """Keys of which clients must show one, as they would to the provider; empty: everybody is served."""
    workers: Annotated[Positive, Field(le=64)] = 1
    """Processes that share the port, 1 to 64; several need a store that they can share."""
    accept_grace_s: Number | None = None
    """Told to end, seconds in which requests are still accepted, unready; null: 5, on loopback 0."""
    drain_s: Seconds = 120
    """Longest time, in seconds, that requests under way get after that; what is left is cut."""
    max_body_bytes: Positive = 67_108_864
    """Largest decoded body, in bytes, of a request on a compacted path; a larger one is answered with 413."""
    max_inflight_bytes: Annotated[Positive, Field(ge=MIN_INFLIGHT_BYTES)] | None = None
    """Bytes of bodies that each process holds; more wait 5 s, then get 503. Null: as its memory allows."""
    max_in_flight: Positive = 1_000
    """Relayed requests that each process serves at once; one more waits 0.1 s for a place, then gets 503."""
    head_timeout_s: Seconds = 15
    """Longest time, in seconds, until a request's head has come; then the connection is closed."""
    body_timeout_s: Seconds = 30
    """Longest time, in seconds, in which less than 500 bytes a second of a body come; then it gets 408."""
    keep_alive_s: SecondsOrNever = 0
    """Seconds of silence after which an event stream gets a comment, for balancers that cut it; 0: never."""
    send_timeout_s: Seconds = 60
    """Longest time, in seconds, in which a client takes nothing of its answer; then it is cut off."""


class StoreSection(BaseModel):
    """Where derived data is kept: checkpoints, the archive and events."""

    model_config = STRICT
    url: StoreUrl | None = None
    """`sqlite:///PATH`, `memory://` or a Redis URL; null: `$REDIS_URL`, else a file in `$XDG_DATA_HOME`."""
    ttl: Duration = "30d"
    """How long a record is kept after it was written: 90s, 15m, 12h, 30d."""
    encryption_keys: tuple[SecretStr, ...] = ()
    """Keys that seal records, newest first: 32 bytes in base64 (extra `crypto`). Empty: not sealed."""

    @property
    def ttl_s(self) -> float:
        """`ttl` in seconds."""
        return parse_duration(self.ttl)


class SessionSection(BaseModel):
    """How the proxy recognises a conversation: by a session id, by the credential and by the messages."""

    model_config = STRICT
    headers: tuple[HeaderName, ...] = SESSION_HEADERS
    """Request headers that may carry a session id; the first that is present wins."""
    body_hints: bool = True
    """Whether the body may name the session where no header does: `metadata.session_id` and the like."""
    tenant: Tenant = "credential"
    """What separates tenants: `credential`, `header:NAME` (set by a gateway that you trust), or `none`."""
    fallback: Literal["content", "none"] = "content"
    """Without any id: `content` finds the conversation by its messages, `none` does not look for it."""
    store_names: bool = False
    """Whether the client's own session id is stored and shown in lists; otherwise only its digest is."""
    store_titles: bool = False
    """Whether the beginning of the latest user message is stored, and shown in lists as a title."""


def _drop_false(value: object) -> object:
    """Returns None for `false`, which means that the condition is not set. Returns other values unchanged."""
    return None if value is False else value


Switch = Annotated[bool | None, AfterValidator(_drop_false)]


class TriggerRow(BaseModel):
    """A compaction starts if every threshold that a row sets is reached. Of several rows, one is enough."""

    model_config = STRICT
    tokens: Number | None = None
    """Tokens of the conversation as it would be forwarded."""
    percent: Percent | None = None
    """The same in percent of the usable window."""
    percent_of_window: Percent | None = None
    """The same in percent of the whole window."""
    messages: Number | None = None
    """Messages gained since the last round."""
    turns: Number | None = None
    """User messages gained since the last round."""
    iterations: Number | None = None
    """Assistant messages gained since the last round."""
    price_tier: Switch = None
    """`true`: just below the size above which the model costs more a token; if it never does, at usable."""
    cost_optimal: Switch = None
    """`true`: where the conversation costs least by growth and prices; at 75 percent where it is unknown."""
    rework_tokens: Number | None = None
    """What `cost_optimal` adds to the price of a round, in input tokens read once more; null: 40,000."""


class KeepSection(BaseModel):
    """What a compaction leaves unchanged. A key that is null takes the strategy's own value."""

    model_config = STRICT
    messages: Number | None = None
    """Newest messages that stay."""
    tail_tokens: Number | None = None
    """Tokens of the newest messages that stay; where a strategy has a share of its own, at most that."""
    user_tokens: Number | None = None
    """Tokens of the ledger, which quotes what users said; `anchored` has one."""
    tool_results: Number | None = None
    """Newest tool results that are never masked; `anchored` masks."""


def _parse_trigger(value: object) -> object:
    """Returns an empty list for `trigger: 0`, which switches all triggers off. Keeps any other value."""
    off = value == 0 and not isinstance(value, bool)
    return () if off or value == "0" else value


def _check_strategy(name: str) -> str:
    """Returns the name of a strategy unchanged.

    Raises:
        ValueError: If there is no strategy of that name. The message suggests a similar name.
    """
    if name not in STRATEGIES:
        close = get_close_matches(name, STRATEGIES, n=1)
        meant = f", did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"one of {', '.join(STRATEGIES)}{meant}")
    return name


class CompactionSection(BaseModel):
    """When and how a conversation is compacted. A key that is null takes the strategy's own value."""

    model_config = STRICT
    mode: Literal["active", "shadow", "bypass"] = "active"
    """`active`; `shadow` plans and reports without a summary call; `bypass` relays only."""
    strategy: Annotated[str, AfterValidator(_check_strategy)] = DEFAULT_STRATEGY
    """How to compact: one of the rows of `compaction.strategies`."""
    trigger: Annotated[tuple[TriggerRow, ...] | None, BeforeValidator(_parse_trigger)] = None
    """List of rows, any of which fires; 0 or an empty list: never by itself."""
    target_tokens: Positive | None = None
    """Tokens to shrink to; less than the trigger."""
    background: bool | None = None
    """Whether to summarise after the answer, ahead of need; null: `anchored` does."""
    max_block_s: Seconds | None = None
    """Longest time, in seconds, that a request waits for a summary."""
    stand_in_role: StandInRole | None = None
    """Role of the message that stands in for what was removed."""
    recount: Literal["usage", "probe"] = "usage"
    """What corrects estimates: the provider's `usage`; `probe` asks for it with a small request as well."""
    counter: Literal["tiktoken", "characters"] = "tiktoken"
    """How tokens are estimated; `characters` is a quarter of their number, far too low on dense text."""
    on_disconnect: Literal["finish", "cancel"] = "finish"
    """Whether a summary is finished and saved when the client that waited for it has left."""
    keep: KeepSection = KeepSection()
    """What stays."""
    strategies: StrategiesSection = StrategiesSection()  # type: ignore[valid-type]  # built from a table
    """Fields of the strategies; a key above that is set beats them."""

    @field_validator("trigger")
    @classmethod
    def _drop_inert_rows(cls, rows: tuple[TriggerRow, ...] | None) -> tuple[TriggerRow, ...] | None:
        """Returns the rows that can start a compaction, or None for None. A field of 0 switches its row off.

        Raises:
            ValueError: If a row sets no threshold, or sets `rework_tokens` without `cost_optimal`.
        """
        filled = [{getattr(row, name) for name in TRIGGER_FIELDS} - {None} for row in rows or ()]
        if set() in filled:
            raise ValueError("a row names at least one of " + ", ".join(TRIGGER_FIELDS))
        if any(row.rework_tokens is not None and not row.cost_optimal for row in rows or ()):
            raise ValueError("rework_tokens means something beside cost_optimal only")
        if rows is None:
            return None
        return tuple(row for row, values in zip(rows, filled, strict=True) if 0 not in values)


class SummarySection(BaseModel):
    """Which model writes summaries, and how. A key that is null takes the strategy's own value."""

    model_config = STRICT
    model: Annotated[str, Field(min_length=1)] | None = None
    """Summary model; null: a cheap one of the upstream's, for `full` the request's own (`same`); `none`."""
    base_url: HttpUrl | None = None
    """Base URL of its provider; null: the upstream's. Another origin needs an `api_key` of its own."""
    wire: Literal["chat", "responses", "messages"] = "chat"
    """What `base_url` speaks; without one a summary is asked for on the request's own wire."""
    api_key: Key = SecretStr("")
    """Key for summary calls; empty: that of the request."""
    max_tokens: Positive | None = None
    """Tokens that a summary may take."""
    timeout_s: Seconds = 30
    """Longest time for a summary call, in seconds."""
    prompt_file: str | None = None
    """File with instructions in place of the built-in ones."""
    instructions: str = ""
    """Text added to the instructions."""
    input: Literal["transcript", "aligned"] | None = None
    """What the summary model sees: a fenced `transcript`, or the conversation itself (`aligned`)."""
    calls_per_hour: Number = 600
    """Summary calls of a tenant an hour and process; one of over 100,000 tokens is several. 0: no bound."""


class ModelSection(BaseModel):
    """Settings for models whose names match a glob. A section in it replaces only the keys that it sets."""

    model_config = STRICT
    window: Positive | None = None
    """Largest number of input tokens; null: learned, known, or 128,000."""
    reserve_output: Number | None = None
    """Tokens set aside for the answer; null: the strategy's own."""
    alternation: Literal["none", "strict"] = "none"
    """`strict` where user and assistant messages must alternate."""
    tools: bool | None = None
    """Whether it takes tools, for `recall.tool`; null: as its name says, or where a request has some."""
    prices: PricesSection | None = None
    """What its tokens cost (keys below); null: as the table of prices knows them."""
    compaction: CompactionSection | None = None
    """Keys of `compaction` for these models."""
    summary: SummarySection | None = None
    """Keys of `summary` for these models."""
    recall: RecallSection | None = None
    """Keys of `recall` for these models."""


class ObservabilitySection(BaseModel):
    """What the proxy reports about itself in logs and traces."""

    model_config = STRICT
    log_format: Literal["json", "console"] = "json"
    """`json` is one object a line, `console` is for reading."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level whose lines are logged."""
    access_log: AccessLog = "off"
    """A line for each request (`all`), or for each that ended in an error (`errors`), without a query."""
    trace_content: Annotated[bool, OnlyValue(value=False)] = False
    """Whether message text may enter traces."""
    otlp_endpoint: HttpUrlIfAny = ""
    """Base URL of a collector for traces (OTLP over HTTP, extra `otel`); empty: that of `OTEL_…`, or none."""
    old_metric_names: bool = True
    """Whether each metric also has its earlier name, without `compaction_proxy_`; until version 0.2."""

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


class WireSection(BaseModel):
    """The provider for requests of one wire. A key that is not set takes its value from `upstream`."""

    model_config = STRICT
    base_url: HttpUrl | None = None
    """Base URL of the provider for this wire. Null: `upstream.base_url`."""
    api_key: Key = SecretStr("")
    """API key that replaces the client's. Empty: `upstream.api_key`, if the origin is the same."""


class WiresSection(BaseModel):
    """The providers for single wires. Requests for chat completions always go to `upstream.base_url`."""

    model_config = STRICT
    responses: WireSection = WireSection()
    """Requests to `…/responses`."""
    messages: WireSection = WireSection()
    """Anthropic Messages requests. If the upstream is OpenAI without `api_key`, they go to Anthropic."""


class UpstreamSection(BaseModel):
    """The provider to which requests are forwarded."""

    model_config = STRICT
    base_url: HttpUrl = "https://api.openai.com/v1"
    """Base URL of the provider. The proxy appends the client's path, and does not repeat a common `/v1`."""
    api_key: Key = SecretStr("")
    """API key that replaces the client's. Empty: the proxy forwards the client's own key."""
    engine: Literal["native", "aiohttp"] = "native"
    """HTTP engine: `native`. Until version 0.2, `aiohttp` is accepted with a warning and does the same."""
    timeout_s: Seconds = 600
    """Seconds to wait for the next byte from the upstream."""
    stream_usage: Annotated[str, OnlyValue("observe")] = "observe"
    """Whether the proxy only observes `usage` on streams."""
    lower_max_tokens: AutoOrFalse = "auto"
    """`auto`: lower `max_tokens` and retry if the upstream refuses prompt plus output. `false`: never."""
    responses_compact: Literal["auto", "relay", "answer"] = "auto"
    """Who answers `…/responses/compact`: the upstream (`relay`), the proxy (`answer`), or `auto`."""
    prices: Literal["auto", "list"] = "auto"
    """`auto`: list prices apply only to public upstreams. `list`: also to upstreams on private networks."""
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
            and parse_origin(base_url) == parse_origin(OPENAI_URL)
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
    """Search tool for removed messages: `none`, `inject` (only after a compaction) or `always`."""
    max_hops: Hops = 4
    """Maximum number of search steps in one answer, 1 to 16. Each step runs up to 8 searches."""
    auto: Literal["none", "inject"] = "none"
    """`inject`: insert removed text that matches the latest user message in front of that message."""
    auto_tokens: RecalledTokens = 500
    """Maximum tokens of the text that `auto` inserts, 50 to 2,000."""
    auto_score: Share = 0.25
    """Minimum match score for `auto`, 0 to 1. Lower values return more irrelevant passages."""


# Maximum configurable price, in dollars per million tokens: one dollar for each token. Much higher prices
# could make sums infinite, and JSON has no infinity.
MAX_DOLLARS = 1_000_000
Dollars = Annotated[float, BeforeValidator(reject_boolean), Field(ge=0, le=MAX_DOLLARS)]
PRICE_SOURCE = "configuration"


class SurchargeSection(BaseModel):
    """Prices of requests above a certain size. They apply to all tokens of such a request."""

    model_config = STRICT
    above_tokens: Positive
    """Size of a request, in input tokens, above which these prices apply."""
    input: Dollars
    """Dollars per million input tokens. Must be higher than the price without the surcharge."""
    cached: Dollars | None = None
    """Dollars per million cached input tokens. Null: raised by the same factor as `input`."""
    cache_write: Dollars | None = None
    """Dollars per million input tokens written to the cache. Null: raised by the same factor as `input`."""
    output: Dollars | None = None
    """Dollars per million output tokens. Null: the price without the surcharge."""


class PricesSection(BaseModel):
    """Prices of a model, in dollars per million tokens."""

    model_config = STRICT
    input: Dollars
    """Dollars per million input tokens."""
    cached: Dollars | None = None
    """Dollars per million cached input tokens. Null: the price of `input`."""
    cache_write: Dollars | None = None
    """Dollars per million input tokens written to the cache. Null: the price of `input`."""
    output: Dollars
    """Dollars per million output tokens."""
    surcharge: SurchargeSection | None = None
    """Prices of large requests: `above_tokens`, `input`, `cached`, `cache_write`, `output`. Null: none."""

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
            raise ValueError(f"the price of input is {surcharge.input:g}; it must be higher than {without:g}")
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
    """How much text of removed messages the proxy keeps. Beyond these limits, it deletes the oldest text."""

    model_config = STRICT
    conversation_mb: Number = 16
    """Limit for one conversation and its branches, in megabytes before compression. 0: no limit."""
    tenant_mb: Number = 512
    """Limit for all conversations of a tenant, in megabytes before compression. 0: no limit."""

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
    """Address to listen on. Set `admin_key` if it is not a loopback address."""
    port: Annotated[Number, Field(le=65_535)] = 4141
    """TCP port. 0 selects a free port."""
    unix_socket: str | None = None
    """Path of a Unix socket, for its owner and group, instead of host and port. Null: TCP."""
    tls_certificate: str | None = None
    """PEM file with a certificate chain, to serve HTTPS. Null: plain HTTP."""
    tls_key: str | None = None
    """PEM file with the private key of the certificate, without a password."""
    base_path: BasePath = ""
    """Prefix of the proxy's own paths (health, metrics, admin). Empty: none."""
    admin_key: Key = SecretStr("")
    """Key of the admin API and dashboard. Empty: generated on loopback addresses. `none`: no key there."""
    secret: SecretStr = SecretStr("")
    """Any text, from which tenant ids are derived. Empty: generated once and kept with the store."""
    previous_secrets: tuple[Key, ...] = ()
    """Earlier values of `secret`. The proxy still decrypts compaction items that were sealed with them."""
    client_keys: tuple[Key, ...] = ()
    """API keys that clients may use. If empty, the proxy accepts any client."""
    workers: Annotated[Positive, Field(le=64)] = 1
    """Number of worker processes, 1 to 64. More than one needs a shared store, not `memory://`."""
    accept_grace_s: Number | None = None
    """Seconds to keep accepting requests after SIGTERM while reporting not ready. Null: 5, on loopback 0."""
    drain_s: Seconds = 120
    """Seconds after `accept_grace_s` in which open requests may finish. The proxy then cuts the others."""
    max_body_bytes: Positive = 67_108_864
    """Maximum size of a decoded body on a compacted path, in bytes. Larger requests fail with 413."""
    max_inflight_bytes: Annotated[Positive, Field(ge=MIN_INFLIGHT_BYTES)] | None = None
    """Memory for request bodies per process. Requests wait 5 s for it, then get 503. Null: automatic."""
    max_in_flight: Positive = 1_000
    """Maximum concurrent requests, per process; three quarters for one of several tenants. Others get 503."""
    head_timeout_s: Seconds = 15
    """Seconds to wait for the head of a request before the proxy closes the connection."""
    body_timeout_s: Seconds = 30
    """Maximum seconds a body may arrive slower than 500 B/s before the request fails with 408."""
    keep_alive_s: SecondsOrNever = 0
    """Seconds between comments on a silent event stream, so that load balancers keep it open. 0: none."""
    send_timeout_s: Seconds = 60
    """Maximum seconds in which a client reads nothing before the proxy closes the connection."""


class StoreSection(BaseModel):
    """Where the proxy keeps its data: checkpoints, the archive and events."""

    model_config = STRICT
    url: StoreUrl | None = None
    """`sqlite:///PATH`, `memory://` or a Redis URL. Null: `$REDIS_URL`, or a file in `$XDG_DATA_HOME`."""
    ttl: Duration = "30d"
    """How long the proxy keeps a record after it was written, such as 90s, 15m, 12h or 30d."""
    encryption_keys: tuple[SecretStr, ...] = ()
    """Keys that encrypt records, newest first: 32 bytes in base64. Empty: records are not encrypted."""

    @property
    def ttl_s(self) -> float:
        """`ttl` in seconds."""
        return parse_duration(self.ttl)


class SessionSection(BaseModel):
    """How the proxy recognises a conversation: by a session id, by the credential and by the messages."""

    model_config = STRICT
    headers: tuple[HeaderName, ...] = SESSION_HEADERS
    """Request headers that can contain a session id. The proxy uses the first one that is present."""
    body_hints: bool = True
    """Whether to read the session id from the body, such as `metadata.session_id`, if no header has one."""
    tenant: Tenant = "credential"
    """How to separate tenants: by `credential`, by `header:NAME` (set by a trusted gateway), or `none`."""
    fallback: Literal["content", "none"] = "content"
    """How to identify requests without a session id. `content`: by their messages; `none`: not at all."""
    store_names: bool = False
    """Whether to store the client's session id and show it in lists. Otherwise only its digest is stored."""
    store_titles: bool = False
    """Whether to store the beginning of the latest user message and show it in lists as a title."""


def _drop_false(value: object) -> object:
    """Returns None for `false`, which means that the condition is not set. Returns other values unchanged."""
    return None if value is False else value


Switch = Annotated[bool | None, AfterValidator(_drop_false)]


class TriggerRow(BaseModel):
    """A rule matches if every threshold that it sets is reached. One matching rule starts a compaction."""

    model_config = STRICT
    tokens: Number | None = None
    """Size of the conversation as the proxy would forward it, in tokens."""
    percent: Percent | None = None
    """Size of the conversation, as a percentage of the usable window."""
    percent_of_window: Percent | None = None
    """Size of the conversation, as a percentage of the whole context window."""
    messages: Number | None = None
    """Messages added since the last compaction."""
    turns: Number | None = None
    """User messages added since the last compaction."""
    iterations: Number | None = None
    """Assistant messages added since the last compaction."""
    price_tier: Switch = None
    """`true`: just below the size from which the model charges more per token, or at the usable window."""
    cost_optimal: Switch = None
    """`true`: at the size with the lowest expected cost, or at 75 percent if the cost is unknown."""
    rework_tokens: Number | None = None
    """Extra cost of a compaction for `cost_optimal`, in input tokens that are read again. Null: 40,000."""


class KeepSection(BaseModel):
    """What a compaction leaves unchanged. Null selects the strategy's own value."""

    model_config = STRICT
    messages: Number | None = None
    """Number of newest messages that no compaction removes."""
    tail_tokens: Number | None = None
    """Tokens of newest messages that no compaction removes, at most the strategy's `tail_percent`."""
    user_tokens: Number | None = None
    """Maximum tokens of the ledger, which quotes users. Only `anchored` has a ledger."""
    tool_results: Number | None = None
    """Number of newest tool results that `anchored` never masks."""


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
        raise ValueError(f"expected one of {', '.join(STRATEGIES)}{meant}")
    return name


class CompactionSection(BaseModel):
    """When and how to compact a conversation. Null selects the strategy's own value."""

    model_config = STRICT
    mode: Literal["active", "shadow", "bypass"] = "active"
    """`active`: compact, `shadow`: only report what a compaction would do, `bypass`: only forward."""
    strategy: Annotated[str, AfterValidator(_check_strategy)] = DEFAULT_STRATEGY
    """How to compact: one of the names below `compaction.strategies`."""
    trigger: Annotated[tuple[TriggerRow, ...] | None, BeforeValidator(_parse_trigger)] = None
    """Compaction starts when any rule in this list matches. 0 or an empty list: no automatic compaction."""
    target_tokens: Positive | None = None
    """Size after a compaction, in tokens. Must be below the trigger."""
    background: bool | None = None
    """Whether to prepare the next summary early, after an answer. Null: only with `anchored`."""
    max_block_s: Seconds | None = None
    """Maximum seconds that a request waits for a summary."""
    stand_in_role: StandInRole | None = None
    """Role of the message that replaces removed messages."""
    recount: Literal["usage", "probe"] = "usage"
    """How to correct estimates: from the provider's `usage`, or with extra small requests too (`probe`)."""
    counter: Literal["tiktoken", "characters"] = "tiktoken"
    """How to estimate tokens. `characters`: characters divided by four, which is too low for dense text."""
    on_disconnect: Literal["finish", "cancel"] = "finish"
    """Whether to `finish` or `cancel` a summary call if the waiting client disconnects."""
    keep: KeepSection = KeepSection()
    """Messages that no compaction removes."""
    strategies: StrategiesSection = StrategiesSection()  # type: ignore[valid-type]  # built from a table
    """Settings of each strategy. Keys above that are set override them."""

    @field_validator("trigger")
    @classmethod
    def _drop_inert_rows(cls, rows: tuple[TriggerRow, ...] | None) -> tuple[TriggerRow, ...] | None:
        """Returns the rows that can start a compaction, or None for None. A field of 0 switches its row off.

        Raises:
            ValueError: If a row sets no threshold, or sets `rework_tokens` without `cost_optimal`.
        """
        filled = [{getattr(row, name) for name in TRIGGER_FIELDS} - {None} for row in rows or ()]
        if set() in filled:
            raise ValueError("a rule must set at least one of " + ", ".join(TRIGGER_FIELDS))
        if any(row.rework_tokens is not None and not row.cost_optimal for row in rows or ()):
            raise ValueError("rework_tokens has an effect only together with cost_optimal")
        if rows is None:
            return None
        return tuple(row for row, values in zip(rows, filled, strict=True) if 0 not in values)


class SummarySection(BaseModel):
    """Which model writes summaries, and how. Null selects the strategy's own value."""

    model_config = STRICT
    model: Annotated[str, Field(min_length=1)] | None = None
    """Summary model. `same`: the request's model; `none`: no model. Null: the strategy's default."""
    base_url: HttpUrl | None = None
    """Base URL for summary calls. Null: the upstream. Another origin needs `summary.api_key`."""
    wire: Literal["chat", "responses", "messages"] = "chat"
    """API format of `base_url`. Without `base_url`, summary calls use the format of the request."""
    api_key: Key = SecretStr("")
    """API key for summary calls. Empty: the key of the request."""
    max_tokens: Positive | None = None
    """Maximum output tokens of a summary call."""
    timeout_s: Seconds = 30
    """Maximum duration of a summary call, in seconds."""
    prompt_file: str | None = None
    """File with instructions that replace the built-in ones."""
    instructions: str = ""
    """Text to append to the instructions for the summary model."""
    input: Literal["transcript", "aligned"] | None = None
    """Input of the summary model: a quoted `transcript`, or the conversation's own messages (`aligned`)."""
    calls_per_hour: Number = 600
    """Summary calls per tenant, hour and process. Calls over 100,000 tokens count as several. 0: no limit."""


class ModelSection(BaseModel):
    """Settings for models whose names match a glob. A section in it replaces only the keys that it sets."""

    model_config = STRICT
    window: Positive | None = None
    """Context window in tokens. Null: as the upstream reports, or from the shipped table, or 128,000."""
    reserve_output: Number | None = None
    """Tokens to reserve for the answer. Null: the strategy's default."""
    alternation: Literal["none", "strict"] = "none"
    """`strict`: user and assistant messages must alternate. `none`: any order."""
    tools: bool | None = None
    """Whether the model supports tools, for `recall.tool`. Null: decided by its name and the request."""
    prices: PricesSection | None = None
    """Prices of the model. Null: from the shipped table of prices."""
    compaction: CompactionSection | None = None
    """Keys of `compaction` for these models."""
    summary: SummarySection | None = None
    """Keys of `summary` for these models."""
    recall: RecallSection | None = None
    """Keys of `recall` for these models."""


class ObservabilitySection(BaseModel):
    """Logs, metrics and traces of the proxy."""

    model_config = STRICT
    log_format: Literal["json", "console"] = "json"
    """`json`: one object per line; `console`: text for people."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level to log."""
    access_log: AccessLog = "off"
    """Requests to log: `all`, `errors` or `off`. The log has no query strings."""
    trace_content: Annotated[bool, OnlyValue(value=False)] = False
    """Whether traces can contain message text."""
    otlp_endpoint: HttpUrlIfAny = ""
    """Base URL of an OTLP/HTTP collector (extra `otel`). Empty: from the `OTEL_…` variables, or no traces."""
    old_metric_names: bool = True
    """Whether to also export metrics under their old names, without `compaction_proxy_` (until 0.2)."""

"""The sections of the configuration: frozen models, every key with its unit and default.

The names are a contract with users. A key of a later version is here already, at its neutral value only
(`Only`), so that a file written for this version keeps loading.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator

from proxy.config.values import (
    BasePath,
    Duration,
    HeaderName,
    HttpUrl,
    Key,
    Number,
    Only,
    Percent,
    Positive,
    Seconds,
    StoreUrl,
    Tenant,
    seconds,
)

STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)

SESSION_HEADERS = (
    "x-session-id", "x-litellm-session-id", "helicone-session-id", "x-dynamo-session-id", "x-bf-session-id",
    "x-claude-code-session-id", "x-opencode-session", "x-session-affinity", "x-openwebui-chat-id",
    "x-conversation-id", "x-chat-id", "x-coder-chat-id", "x-kilocode-taskid", "x-mux-workspace-id",
    "x-client-session-id", "x-interaction-id", "x-sm-conversation-id", "thread-id", "session-id",
    "session_id", "conversation_id", "x-litellm-trace-id", "x-portkey-trace-id",
)  # fmt: skip


class ServerSection(BaseModel):
    """Where clients reach us."""

    model_config = STRICT
    host: str = "127.0.0.1"
    """Address to listen on; one that is not loopback should have an `admin_key`."""
    port: Annotated[Number, Field(le=65_535)] = 4141
    """TCP port; 0 takes a free one."""
    base_path: BasePath = ""
    """Prefix of our own paths (health, metrics, admin); empty: none."""
    admin_key: Key = SecretStr("")
    """Bearer key of the admin API and UI; empty: they answer on loopback only."""
    secret: SecretStr = SecretStr("")
    """Key of the digests that separate tenants; empty: made once and kept beside the store."""
    client_keys: Annotated[tuple[SecretStr, ...], Only(())] = ()
    """Keys that clients must show us; empty: none."""
    workers: Annotated[Positive, Field(le=64)] = 1
    """Processes that share the port, 1 to 64; several need a store that they can share."""
    accept_grace_s: Number | None = None
    """Told to end, seconds in which requests are still accepted, unready; null: 5, on loopback 0."""
    drain_s: Seconds = 120
    """Longest time, in seconds, that requests under way get after that; what is left is cut."""
    max_body_bytes: Positive = 67_108_864
    """Largest body, in bytes, of a request on a compacted path; a larger one is answered with 413."""


class UpstreamSection(BaseModel):
    """Where requests go."""

    model_config = STRICT
    base_url: HttpUrl = "https://api.openai.com/v1"
    """Base URL of the provider; the client's path is appended, a shared `/v1` is taken once."""
    api_key: Key = SecretStr("")
    """Key sent upstream in place of the client's; empty: the client's own passes through."""
    engine: Annotated[str, Only("aiohttp")] = "aiohttp"
    """HTTP client that carries relayed requests."""
    timeout_s: Seconds = 600
    """Longest silence of the upstream, in seconds."""
    stream_usage: Annotated[str, Only("observe")] = "observe"
    """Whether `usage` on streams is only observed."""
    lower_max_tokens: Annotated[bool, Only(value=False)] = False
    """Whether a request's `max_tokens` may be lowered to make it fit."""


class StoreSection(BaseModel):
    """Where derived data is kept: checkpoints, the archive and events."""

    model_config = STRICT
    url: StoreUrl | None = None
    """`sqlite:///PATH`, `memory://` or a Redis URL; null: `$REDIS_URL`, else a file in `$XDG_DATA_HOME`."""
    ttl: Duration = "30d"
    """How long a record is kept after it was written: 90s, 15m, 12h, 30d."""
    encryption_keys: tuple[SecretStr, ...] = ()
    """Keys that seal records, newest first: 32 bytes in base64 (extra `crypto`). Empty: not sealed."""
    keep_requests: Annotated[str, Only("auto")] = "auto"
    """Whether the last request of a conversation is kept."""

    @property
    def ttl_s(self) -> float:
        """`ttl` in seconds."""
        return seconds(self.ttl)


class SessionSection(BaseModel):
    """How a conversation is recognised. Identity only locates; content decides."""

    model_config = STRICT
    headers: tuple[HeaderName, ...] = SESSION_HEADERS
    """Request headers that may carry a session id; the first that is present wins."""
    tenant: Tenant = "credential"
    """What separates tenants: `credential`, `header:NAME` (set by a gateway that you trust), or `none`."""
    fallback: Literal["content", "none"] = "content"
    """Without any id: `content` finds the conversation by its messages, `none` does not look for it."""


class TriggerRow(BaseModel):
    """A condition for compacting; every field that is set must be reached. Rows are alternatives."""

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


class KeepSection(BaseModel):
    """What a round leaves as it is. Null: the strategy's own."""

    model_config = STRICT
    messages: Number | None = None
    """Newest messages that stay."""
    tail_tokens: Annotated[Number | None, Only(None)] = None
    """Tokens of the newest messages that stay."""
    user_tokens: Annotated[Number | None, Only(None)] = None
    """Tokens of user text that stays."""
    tool_results: Annotated[Number | None, Only(None)] = None
    """Newest tool results that stay."""


class ChainedStrategy(BaseModel):
    """The strategy `chained`: one summary, which each round integrates and extends."""

    model_config = STRICT
    percent: Percent = 80
    """Trigger, in percent of the window without the three reserves; 0 switches it off."""
    keep_messages: Number = 10
    """Newest messages that stay."""
    system_reserve_tokens: Number = 2_000
    """Tokens set aside for system prompt and tools."""
    output_reserve_tokens: Number = 4_000
    """Tokens set aside for the answer; the request's own `max_tokens` where larger."""
    safety_tokens: Number = 5_000
    """Tokens set aside for errors of the estimate; all reserves together take a quarter at most."""
    summary_tokens: Positive = 800
    """Tokens that the summary is asked to stay under."""
    summary_max_tokens: Positive = 1_000
    """Tokens that the summary may take."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.3
    """Sampling temperature of the summary call, 0 to 2."""
    task_tokens: Positive = 2_000
    """Tokens of the task that are quoted verbatim; a longer one keeps its head and tail."""
    tool_characters: Positive = 500
    """Characters of a tool result that the summary model sees."""
    message_characters: Positive = 2_000
    """Characters of any other message that the summary model sees."""


class StrategiesSection(BaseModel):
    """Every field of every strategy."""

    model_config = STRICT
    chained: ChainedStrategy = ChainedStrategy()
    """See the rows below."""


def _rows(value: object) -> object:
    """`trigger: 0` switches every trigger off, like an empty list."""
    off = value == 0 and not isinstance(value, bool)
    return () if off or value == "0" else value


def _unset(value: object) -> object:
    """`background: false` and null are the same while nothing runs in the background."""
    return None if value in (False, "false") else value


class CompactionSection(BaseModel):
    """When and how a conversation is compacted. Null: the strategy's own."""

    model_config = STRICT
    mode: Literal["active", "shadow", "bypass"] = "active"
    """`active`; `shadow` plans and reports without a summary call; `bypass` relays only."""
    strategy: Annotated[str, Only("chained")] = "chained"
    """How to compact."""
    trigger: Annotated[tuple[TriggerRow, ...] | None, BeforeValidator(_rows)] = None
    """List of rows, any of which fires; 0 or an empty list: never by itself."""
    target_tokens: Annotated[Positive | None, Only(None)] = None
    """Tokens to shrink to."""
    background: Annotated[bool | None, Only(None), BeforeValidator(_unset)] = None
    """Whether to summarise after the answer, ahead of need; this version does not."""
    max_block_s: Seconds | None = None
    """Longest time, in seconds, that a request waits for a summary; null: `summary.timeout_s`."""
    stand_in_role: Literal["user", "assistant", "system"] | None = None
    """Role of the message that stands in for what was removed."""
    recount: Annotated[str, Only("usage")] = "usage"
    """What corrects estimates: the `usage` that the provider reports."""
    counter: Literal["tiktoken", "characters"] = "tiktoken"
    """How tokens are estimated; `characters` is a quarter of their number, far too low on dense text."""
    on_disconnect: Literal["finish", "cancel"] = "finish"
    """Whether a summary is finished and saved when the client that waited for it has left."""
    keep: KeepSection = KeepSection()
    """What stays."""
    strategies: StrategiesSection = StrategiesSection()
    """Fields of the strategies."""

    @field_validator("trigger")
    @classmethod
    def _effective(cls, rows: tuple[TriggerRow, ...] | None) -> tuple[TriggerRow, ...] | None:
        """Rows that can fire: a 0 switches its row off."""
        filled = [{value for _, value in row if value is not None} for row in rows or ()]
        if set() in filled:
            raise ValueError("a row names at least one of " + ", ".join(TriggerRow.model_fields))
        return None if rows is None else tuple(row for row in rows if 0 not in {value for _, value in row})


class SummarySection(BaseModel):
    """Who writes summaries. Null: the strategy's own."""

    model_config = STRICT
    model: str | None = None
    """Summary model; null: a cheap one of the upstream's origin; `same`: the request's; `none`: no calls."""
    base_url: HttpUrl | None = None
    """Base URL of its provider; null: the upstream's. Another origin needs an `api_key` of its own."""
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
    input: Annotated[str, Only("transcript")] = "transcript"
    """Form in which the summary model sees the messages."""


class RecallSection(BaseModel):
    """How the model gets at what was removed."""

    model_config = STRICT
    tool: Annotated[str, Only("none")] = "none"
    """Whether a search tool is offered."""
    auto: Annotated[str, Only("none")] = "none"
    """Whether matching passages are added by themselves."""


class ModelSection(BaseModel):
    """What differs for the models whose name matches; sections replace only the keys they name."""

    model_config = STRICT
    window: Positive | None = None
    """Largest number of input tokens; null: learned, known, or 128,000."""
    reserve_output: Number | None = None
    """Tokens set aside for the answer; null: the strategy's own."""
    alternation: Literal["none", "strict"] = "none"
    """`strict` where user and assistant messages must alternate."""
    prices: Annotated[dict[str, float] | None, Only(None)] = None
    """Prices of its tokens."""
    compaction: CompactionSection | None = None
    """Keys of `compaction` for these models."""
    summary: SummarySection | None = None
    """Keys of `summary` for these models."""
    recall: RecallSection | None = None
    """Keys of `recall` for these models."""


class ObservabilitySection(BaseModel):
    """What we say about ourselves."""

    model_config = STRICT
    log_format: Literal["json", "console"] = "json"
    """`json` is one object a line, `console` is for reading."""
    trace_content: Annotated[bool, Only(value=False)] = False
    """Whether message text may enter traces."""
    otlp_endpoint: Annotated[str, Only("")] = ""
    """Where traces go; empty: nowhere."""

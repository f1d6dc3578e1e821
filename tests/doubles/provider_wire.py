"""Defines a wire of the three-wire provider as a record of functions, so that its wires share the other code.

A wire converts each request to a `WireRequest`, whose prompt has the format of Chat Completions. Tokens are
counted, the prompt cache is simulated and replies are composed from this prompt only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from compaction_proxy.cli.demo.chat import DemoUsage, JsonObject, Reply
from compaction_proxy.cli.demo.validation import Refusal, refuse_unknown_model

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A valid request in a form that the wires share.

    Attributes:
        body: The request body in the format of its wire.
        prompt: The same request in the format of Chat Completions, with `model`, `messages` and `tools`.
        output_tokens: The requested limit of output tokens. 0 if the request sets none.
        streamed: Whether the client wants a stream.
        thinks: Whether the reply has a thought.
        cached_messages: Number of messages, from the first, for which the prompt cache is used. None means
            all messages.
        counts_only: Whether the client only wants the size of the prompt, in tokens.
    """

    body: JsonObject
    prompt: JsonObject
    output_tokens: int
    streamed: bool
    thinks: bool = False
    cached_messages: int | None = None
    counts_only: bool = False


@dataclass(frozen=True, slots=True)
class WireReply(Reply):
    """The content of an answer. `thought` is the model's reasoning before it, or empty."""

    thought: str = ""


@dataclass(frozen=True, slots=True)
class WireUsage(DemoUsage):
    """Tokens of one exchange. `completion_tokens` includes the thought.

    Attributes:
        written_tokens: Input tokens written to the prompt cache because the client marked them for it.
        thought_tokens: Output tokens of the thought.
    """

    written_tokens: int = 0
    thought_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WireAnswer:
    """A reply with the data that wires need to encode it.

    Attributes:
        request: The request that is answered.
        number: Number of the request among all requests to the provider, from 1.
        created: Seconds since the epoch.
        prompt_mark: Hexadecimal digits derived from the prompt. Ids in the answer contain them.
        reply: The content.
        usage: The tokens of the exchange.
    """

    request: WireRequest
    number: int
    created: int
    prompt_mark: str
    reply: WireReply
    usage: WireUsage

    @property
    def model(self) -> str:
        """The name of the requested model."""
        return str(self.request.prompt["model"])


@dataclass(frozen=True, slots=True)
class ProviderWire:
    """Functions that read requests and write answers in the format of a wire.

    Attributes:
        validate: Returns the first error in a body, or None.
        read_request: Converts a valid body to a request.
        check_overflow: Returns the refusal of a prompt that does not fit, or None. It takes the context
            window, the prompt and the requested output, in tokens.
        encode_answer: Encodes an answer that is not streamed.
        encode_events: Encodes an answer as server-sent events, including the last one.
        encode_refusal: Encodes the body of an error. It takes the error and the number of the request.
        build_headers: Returns the headers of every answer. It takes the number of the request.
        build_model_refusal: Returns the refusal of a model that the provider does not offer. It takes its
            name.
        required_header: The name of a header that every request must have. Empty if none is needed.
    """

    validate: Callable[[JsonObject], Refusal | None]
    read_request: Callable[[JsonObject], WireRequest]
    check_overflow: Callable[[int, int, int], Refusal | None]
    encode_answer: Callable[[WireAnswer], bytes]
    encode_events: Callable[[WireAnswer], Iterator[bytes]]
    encode_refusal: Callable[[Refusal, int], bytes]
    build_headers: Callable[[int], Headers]
    build_model_refusal: Callable[[str], Refusal] = refuse_unknown_model
    required_header: bytes = b""

"""Defines a wire of the demo provider as a record of functions, so that all wires share the other code.

A wire converts each request to a `DemoRequest`. The prompt of a `DemoRequest` has the format of Chat
Completions on every wire. Tokens are counted, the prompt cache is simulated and replies are composed from
this prompt only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from compaction_proxy.cli.demo.chat import DemoAnswer, DemoRequest, JsonObject
from compaction_proxy.cli.demo.validation import Refusal, refuse_unknown_model

Headers = tuple[tuple[bytes, bytes], ...]

OVERFLOW = "context_length_exceeded"  # logged on every wire; the answer has it if its wire has error codes


@dataclass(frozen=True, slots=True)
class DemoWire:
    """Functions that read requests and write answers in the format of a wire.

    Attributes:
        validate: Returns the first error in a body, or None.
        read_request: Converts a valid body to a request.
        check_overflow: Returns the refusal of a prompt that does not fit, or None. It takes the context
            window, the prompt and the requested output, in tokens.
        encode_answer: Encodes an answer that is not streamed.
        encode_events: Encodes an answer as server-sent events, including the last one.
        encode_refusal: Encodes the body of an error. It takes the error and the number of the request.
        encode_late_error: Encodes a stream that begins normally and then reports an error. It takes the
            answer, the error and a value of `faults.LATE`.
        build_headers: Returns the headers of every answer. It takes the number of the request.
        build_model_refusal: Returns the refusal of a model that the provider does not offer. It takes its
            name.
        empty_events: The events of a stream without content.
        required_header: The name of a header that every request must have. Empty if none is needed.
    """

    validate: Callable[[JsonObject], Refusal | None]
    read_request: Callable[[JsonObject], DemoRequest]
    check_overflow: Callable[[int, int, int], Refusal | None]
    encode_answer: Callable[[DemoAnswer], bytes]
    encode_events: Callable[[DemoAnswer], Iterator[bytes]]
    encode_refusal: Callable[[Refusal, int], bytes]
    encode_late_error: Callable[[DemoAnswer, Refusal, str], Iterator[bytes]]
    build_headers: Callable[[int], Headers]
    build_model_refusal: Callable[[str], Refusal] = refuse_unknown_model
    empty_events: tuple[bytes, ...] = ()
    required_header: bytes = b""

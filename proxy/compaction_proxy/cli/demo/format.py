"""One wire as the demo provider speaks it: a record of functions, so that all else is shared.

What a wire calls a conversation is read into `Asked`, whose prompt is a chat request; counting, remembering
and answering know nothing else.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from compaction_proxy.cli.demo.chat import DemoAnswer, DemoRequest, JsonObject
from compaction_proxy.cli.demo.validation import Refusal, refuse_unknown_model

Headers = tuple[tuple[bytes, bytes], ...]

OVERFLOW = "context_length_exceeded"  # in the log on every wire, in answers where the wire has codes


@dataclass(frozen=True, slots=True)
class DemoWire:
    """How requests are read and answers written.

    Attributes:
        judge: The first thing wrong with a body, or None.
        read: A body that nothing is wrong with.
        overflow: What is refused, from window, prompt and output asked for, in tokens; None if they fit.
        whole: An answer that is not streamed.
        events: An answer as server-sent events, the last one included.
        refused: The body of an error, from it and the number of the request.
        late: The events of a stream that tells of an error after its beginning, from the answer begun, the
            error, and how it is told (`faults.LATE`).
        headers: What every answer carries, from the number of the request.
        unknown_model: What is refused where the named model is not offered.
        empty: The events of a stream that says nothing.
        needs: A header without which no request is served.
    """

    judge: Callable[[JsonObject], Refusal | None]
    read: Callable[[JsonObject], DemoRequest]
    overflow: Callable[[int, int, int], Refusal | None]
    whole: Callable[[DemoAnswer], bytes]
    events: Callable[[DemoAnswer], Iterator[bytes]]
    refused: Callable[[Refusal, int], bytes]
    late: Callable[[DemoAnswer, Refusal, str], Iterator[bytes]]
    headers: Callable[[int], Headers]
    unknown_model: Callable[[str], Refusal] = refuse_unknown_model
    empty: tuple[bytes, ...] = ()
    needs: bytes = b""

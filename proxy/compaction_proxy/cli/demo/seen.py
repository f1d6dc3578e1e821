"""Defines the record that the demo provider keeps of each request."""

import json
from dataclasses import dataclass

from compaction_proxy.cli.demo.chat import JsonObject


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as the provider received it.

    Attributes:
        number: Number of the request, from 1.
        path: The path as sent.
        headers: The headers in order, names in lower case.
        body: The bytes of the body as sent.
        model: The requested model. Empty if the request was refused before the model was read.
        prompt_tokens: Tokens of the prompt. 0 if the request was refused before its tokens were counted.
        output_tokens: The requested limit of output tokens. 0 if the request set none.
        cached_tokens: Tokens of the prompt read from the cache.
        status: Status of the answer. 0 if there was none.
        code: The error code, or an empty text.
    """

    number: int
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    model: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    status: int = 0
    code: str = ""

    def parse_messages(self) -> list[JsonObject]:
        """Parses the body and returns the messages as sent."""
        messages: list[JsonObject] = json.loads(self.body)["messages"]
        return messages


def to_log_fields(seen: SeenRequest) -> JsonObject:
    """Returns the fields of a request for `GET /__log`: without headers, because they hold credentials."""
    return {
        "number": seen.number,
        "path": seen.path,
        "model": seen.model,
        "prompt_tokens": seen.prompt_tokens,
        "output_tokens": seen.output_tokens,
        "cached_tokens": seen.cached_tokens,
        "status": seen.status,
        "code": seen.code,
        "body": seen.body.decode("utf-8", "replace"),
    }

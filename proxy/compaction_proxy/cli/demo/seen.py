"""What the demo provider remembers of each request."""

import json
from dataclasses import dataclass

from compaction_proxy.cli.demo.chat import JsonObject


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One request as the provider saw it.

    Attributes:
        number: 1 for the first request.
        path: The path as sent.
        headers: In order, names in lower case.
        body: The very bytes.
        model: Empty when the body had none.
        prompt_tokens: 0 when the body was refused unread.
        output_tokens: What it asked for at most; 0 when it did not say.
        cached_tokens: Tokens of its beginning that were known.
        written_tokens: Tokens that the cache was told to learn, where a client marks them.
        status: Of the answer; 0 when there was none.
        code: Of the error, if any.
    """

    number: int
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    model: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    status: int = 0
    code: str = ""

    def parse_messages(self) -> list[JsonObject]:
        """The messages of the request as they were sent; on the Responses wire its input."""
        body = json.loads(self.body)
        found: list[JsonObject] = body["messages"] if "messages" in body else body["input"]
        return found


def to_log_fields(seen: SeenRequest) -> JsonObject:
    """A log line for `GET /__log`: no headers, because they hold credentials."""
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

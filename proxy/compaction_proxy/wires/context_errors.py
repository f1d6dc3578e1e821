"""Recognises provider errors that say that a request is too long, and reads the limit that they name.

Providers report such an error with different statuses, in bodies of different structure, and in different
words. Some send the error in a stream with status 200. So this module searches the text of an error for
patterns, called rules, in a fixed order. It takes the text only from fields that contain error texts, because
other fields may quote the request.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from compaction_proxy.wires.content_coding import IDENTITY, Inflater
from compaction_proxy.wires.json.values import as_list, as_object, parse_json
from compaction_proxy.wires.sse import EventSplitter, read_data

_NUMBER: Final = r"(?<!\d)(?P<%s>\d{1,3}(?:[,._' ]\d{3}){1,2}|\d{1,9})(?!\d)"


def _compile_rule(wording: str) -> re.Pattern[str]:
    """Compiles a rule: a pattern for text in lower case with single spaces.

    A word in braces, such as `{limit}`, `{used}` or `{output}`, matches a number. The word becomes the name
    of a group of the pattern. Write every gap in a rule with a maximum length, such as `.{0,80}?`. Otherwise,
    the matching time could grow faster than the length of the text.
    """
    return re.compile(re.sub(r"\{([a-z]+)\}", lambda name: _NUMBER % name[1], wording))


OVERFLOW_CODES: Final = re.compile(
    r"\b(?:context_length_exceeded|context_window_exceeded|model_context_window_exceeded"
    r"|exceed_context_size_error|context_exceeded|prompt_too_long|input_too_long)\b"
)
EXCLUDED_WORDING: Final = re.compile(
    r"rate.?limit|too many requests|quota|overloaded|throttl|please wait before|too many tools"
    r"|string too long\. expected a string with maximum length"
)
TOKENS_PER_MINUTE_WORDING: Final = re.compile(r"tokens per min|\(tpm\)")
QUOTA_RULES: Final = (
    _compile_rule(r"request too large.{0,300}?limit:? {limit}.{0,40}?requested:? {used}"),
    re.compile(r"request too large"),
)
BODY_SIZE_WORDING: Final = re.compile(
    r"request[ _](?:entity[ _])?too[ _]large|payload ?too ?large|content too large|body too large"
    r"|request exceeds the maximum size|request_too_large"
)

SUM_RULE: Final = _compile_rule(
    r"context length (?:is|of) {limit} tokens.{0,120}?requested.{0,60}?(?:\(|tokens: )"
)
SUM_ENDS: Final = re.compile(r"\)|\. ")
SUM_SHARE_RULE: Final = _compile_rule(
    r"{count} (?:tokens )?(?:in|of|for|from) (?:the |your )?(?P<what>[a-z]{1,12})"
)
OUTPUT_SHARES: Final = frozenset({"completion", "output"})

_WINDOW: Final = r"maximum context length (?:is|of) {limit}(?: tokens)?"
RULES: Final = (
    # Errors of vLLM
    _compile_rule(_WINDOW + r"\. however, your request has {used} input tokens plus {output} 'max_tokens'"),
    _compile_rule(
        r"is too large: {output}\. this model's " + _WINDOW + r" and your request has {used} input tokens"
    ),
    _compile_rule(
        _WINDOW + r"\. however, you requested {output} output tokens and your prompt contains at least \d"
    ),
    _compile_rule(
        _WINDOW
        + r"\. however, you requested {output} output tokens and your prompt contains {used} input tokens"
    ),
    _compile_rule(r"prompt \(length {used}\) is longer than the maximum model length of {limit}"),
    _compile_rule(r"max_tokens must be at least 1, got -\d"),
    # Errors of OpenAI and Azure, and of providers that have copied their wording
    _compile_rule(
        _WINDOW + r".{0,80}?(?:resulted in|your request has|contains) (?:about )?{used} (?:input )?tokens"
    ),
    _compile_rule(_WINDOW + r".{0,80}?requested (?:about )?{used} tokens in the messages"),
    _compile_rule(
        r"input tokens exceed the configured limit of {limit} tokens.{0,80}?resulted in {used} tokens"
    ),
    _compile_rule(_WINDOW),
    # Errors of Anthropic and Fireworks
    _compile_rule(r"prompt is too long:? {used} tokens > {limit} maximum"),
    _compile_rule(r"input length and max_tokens exceed context limit: {used} \+ {output} > {limit}"),
    _compile_rule(r"prompt is too long: {used}, model maximum context length:? {limit}"),
    # Errors of Gemini, Mistral, xAI, Copilot, Cerebras, Kimi, Poolside and Together
    _compile_rule(r"input token count \(?{used}\)? exceeds the maximum number of tokens allowed \(?{limit}"),
    _compile_rule(r"input token count exceeds the maximum number of tokens allowed \(?{limit}"),
    _compile_rule(
        r"prompt contains {used} tokens.{0,80}?too large for model with {limit} maximum context length"
    ),
    _compile_rule(r"maximum prompt length is {limit} but the request contains {used}"),
    _compile_rule(r"prompt token count of {used} exceeds the limit of {limit}"),
    _compile_rule(r"current length is {used} while limit is {limit}"),
    # The error that the next rule matches also contains the size of the request. The rule does not read this
    # size, because it includes the output limit.
    _compile_rule(r"exceeded model token limit: {limit}"),
    _compile_rule(r"input length {used} exceeds the maximum allowed input length of {limit}"),
    _compile_rule(r"input \({used} tokens\) is longer than the model'?s context length \({limit} tokens"),
    # Errors of llama.cpp (the second rule matches the text that `_iter_error_texts` builds from fields),
    # llama-cpp-python, LM Studio and TGI
    _compile_rule(r"request \({used} tokens\) exceeds the available context size \({limit} tokens"),
    _compile_rule(r"n_prompt_tokens {used} n_ctx {limit}"),
    _compile_rule(r"requested tokens \({used}\) exceed context window of {limit}"),
    _compile_rule(r"greater than the context length \(n_keep: {used} ?>= n_ctx: {limit}"),
    _compile_rule(
        r"trying to keep the first {used} tokens when context the overflows"
        r".{0,200}?context length of only {limit}"
    ),
    _compile_rule(
        r"inputs tokens \+ max_new_tokens must be <= {limit}\."
        r" given: {used} inputs tokens and {output} max_new_tokens"
    ),
    _compile_rule(r"inputs must have less than {limit} tokens\. given: {used}"),
    # Errors without numbers, from several providers
    _compile_rule(
        r"exceeds? the (?:model(?:'?s)? )?context window|context window exceeds limit"
        r"|exceeds? the available context size|prompt is too long|prompt too long; exceeded"
        r"|input is too long for requested model|reduce the length of the messages"
        r"|total length of all messages is too long|exceeds the model'?s maximum context length"
        r"|tokens to keep from the initial prompt is greater than the context length"
    ),
)
# Ollama drops the beginning of a long prompt without an error. If the remaining prompt has no user message,
# the chat templates of some models fail, and Ollama returns an error that contains this text.
MISSING_USER_MESSAGE_RULE: Final = _compile_rule("no user query found in messages")

OverflowKind = Literal["context", "context_output", "tpm", "bytes"]

MAX_BODY_BYTES: Final = 65_536
_MAX_TEXT_CHARACTERS: Final = 16_384
_MAX_NODES: Final = 256
_MAX_ITEMS: Final = 16
_SUM_CHARACTERS: Final = 200
_CUT_AWAY_STATUS: Final = 500
_OPENING: Final = frozenset({"{", "["})
_JSON_STARTS: Final = _OPENING | {'"'}
_STREAM_STARTS: Final = ("data:", "event:", "id:", "retry:", ":")
# Matches the line `event: error` in a server-sent event.
_ERROR_NAME: Final = re.compile(rb"(?:^|[\r\n])event:[ \t]*error[ \t]*(?:[\r\n]|\Z)")

_QUOTA_STATUS: Final = 429
_UNSIZED_STATUSES: Final = frozenset({413, _QUOTA_STATUS})
_TEXT_STATUSES: Final = frozenset({500, 502, 503})
_STATUSES: Final = frozenset({200, 400, 413, 422, _QUOTA_STATUS}) | _TEXT_STATUSES

# The fields that contain codes and messages of errors. The proxy ignores other fields, because they may quote
# the request, which can contain any text.
_ERROR_FIELDS: Final = frozenset(
    {"error", "errors", "error_message", "error_type", "message", "msg", "detail", "details", "description"}
    | {"code", "type", "reason", "cause", "metadata", "raw", "response", "title"}
)


@dataclass(frozen=True, slots=True)
class Overflow:
    """Describes an error of the upstream about a request that is too large.

    Attributes:
        kind: The cause of the error. `context` means that the input exceeds the context window, or may exceed
            it. `context_output` means that the input alone fits, but not together with the requested output.
            `tpm` means that the request alone exceeds the quota of tokens per minute, so waiting does not
            help. `bytes` means that the body has too many bytes.
        limit_tokens: The number of tokens that the model, or for `tpm` the quota, allows; None if the error
            does not contain it.
        used_tokens: The provider's count of the input tokens, or for `tpm` of all tokens of the request. None
            if the error does not contain it. Also None if the number is only a lower bound or includes the
            output, because calibration must not learn from such numbers.
        output_tokens: Tokens of the requested output; None if the error does not contain them.
        is_size_meaningful: Whether the error proves that the context window is smaller than the refused
            request. False if the status means too many requests (429) or too many bytes (413), or if the
            proxy has only inferred the cause of the error. The proxy uses this attribute only if
            `limit_tokens` is None.
    """

    kind: OverflowKind
    limit_tokens: int | None = None
    used_tokens: int | None = None
    output_tokens: int | None = None
    is_size_meaningful: bool = True


def _decode_text(body: bytes, content_encoding: str) -> str | None:
    if len(body) > MAX_BODY_BYTES:
        return None
    if content_encoding.strip().lower() not in IDENTITY:
        inflater = Inflater(content_encoding, MAX_BODY_BYTES)
        body = inflater.feed(body)
        if inflater.has_failed:
            return None
    return body.decode("utf-8", "replace").strip("\ufeff \t\r\n")


def _iter_error_texts(root: object) -> Iterator[str]:
    """Yields the codes and messages in an error of any structure, outermost first.

    If a string contains JSON, the function searches this JSON as well. It yields the fields
    `n_prompt_tokens` and `n_ctx` of llama.cpp as one text.
    """
    nodes = deque([root])
    for _ in range(_MAX_NODES):
        if not nodes:
            return
        node = nodes.popleft()
        if isinstance(node, dict):
            nodes.extend(value for key, value in node.items() if key.lower() in _ERROR_FIELDS)
            if "n_ctx" in node:
                yield f"n_prompt_tokens {node.get('n_prompt_tokens')} n_ctx {node['n_ctx']}"
        elif isinstance(node, list):
            nodes.extend(node[:_MAX_ITEMS])
        elif isinstance(node, str):
            inner = (
                parse_json(node.encode("utf-8", "surrogatepass")) if node.lstrip()[:1] in _OPENING else None
            )
            if inner is None:
                yield node
            nodes.append(inner)


def _normalize_texts(words: Iterator[str]) -> str:
    """Joins texts, in lower case and with single spaces between words, as the rules in `RULES` expect.

    If a text, or the result, has more than `_MAX_TEXT_CHARACTERS` characters, uses only its beginning.
    """
    text = "\n".join(word[:_MAX_TEXT_CHARACTERS] for word in words)[:_MAX_TEXT_CHARACTERS]
    return " ".join(text.replace("\u2019", "'").replace("`", "").lower().split())


def _match_first(rules: Iterable[re.Pattern[str]], text: str) -> re.Match[str] | None:
    return next(filter(None, (rule.search(text) for rule in rules)), None)


def _parse_number(match: re.Match[str], name: str) -> int | None:
    """Returns the number that the group `name` has matched; None if it is 0 or the group matched nothing."""
    digits = match.groupdict().get(name)
    return (int(re.sub(r"\D", "", digits)) or None) if digits else None


def _build_overflow(limit: int | None, used: int | None, output: int | None) -> Overflow:
    fits = limit is not None and used is not None and output is not None and used < limit
    return Overflow("context_output" if fits else "context", limit, used, output)


def _match_context(text: str) -> Overflow | None:
    if match := SUM_RULE.search(text):
        # The error lists the parts of a sum: `(658 of text input, 732 of tool input, 4096 in the output)`.
        used = output = 0
        shares = SUM_ENDS.split(text[match.end() : match.end() + _SUM_CHARACTERS], 1)[0]
        for share in SUM_SHARE_RULE.finditer(shares):
            count = _parse_number(share, "count") or 0
            if share["what"] in OUTPUT_SHARES:
                output += count
            else:
                used += count
        if used:
            return _build_overflow(_parse_number(match, "limit"), used, output or None)
    match = _match_first(RULES, text)
    if match is None:
        return None
    return _build_overflow(*[_parse_number(match, name) for name in ("limit", "used", "output")])


def _classify_error_texts(status: int, words: Iterator[str]) -> Overflow | None:
    """Classifies an error by its texts. Returns None if it does not say that the request is too large.

    For a status in `_TEXT_STATUSES`, `_match_wording` alone decides. For other statuses, an error that
    mentions tokens per minute can only be an error about the quota. If it does not mention them, a code in
    `OVERFLOW_CODES` is enough, even if the text also matches `EXCLUDED_WORDING`.
    """
    text = _normalize_texts(words)
    if status in _TEXT_STATUSES:
        return _match_wording(status, text)
    if TOKENS_PER_MINUTE_WORDING.search(text):
        quota = _match_first(QUOTA_RULES, text)
        if quota is None:
            return None
        return Overflow("tpm", _parse_number(quota, "limit"), _parse_number(quota, "used"))
    if OVERFLOW_CODES.search(text):
        return _match_context(text) or Overflow("context")
    return None if status == _QUOTA_STATUS else _match_wording(status, text)


def _match_wording(status: int, text: str) -> Overflow | None:
    if EXCLUDED_WORDING.search(text):
        return None
    overflow = _match_context(text)
    if overflow is None and status == _CUT_AWAY_STATUS and MISSING_USER_MESSAGE_RULE.search(text):
        return Overflow("context", is_size_meaningful=False)
    return Overflow("bytes") if overflow is None and BODY_SIZE_WORDING.search(text) else overflow


def _has_answer(choice: object) -> bool:
    """Returns whether an element of `choices` contains a part of the model's reply, and not only a role."""
    fields = as_object(choice)
    message = as_object(fields.get("delta") or fields.get("message"))
    return any(value for name, value in message.items() if name != "role")


def _find_failure(payload: object) -> object:
    """Returns the payload of a response with status 200 if it reports an error; else None.

    If the payload is a list, looks only at its first element. A payload that contains a part of a reply is
    not an error.
    """
    if isinstance(payload, list):
        payload = next(iter(payload), None)
    fields = as_object(payload)
    if any(map(_has_answer, as_list(fields.get("choices")))):
        return None
    response_error = as_object(fields.get("response")).get("error")
    return fields if fields.get("error") or fields.get("type") == "error" or response_error else None


def _read_event_payload(text: str) -> object:
    """Returns the decoded data of a stream's first event that has data; None if the data is not JSON.

    For an `error` event, returns a dict with the data as the value of `error`, even if the data is not JSON.
    """
    for event in EventSplitter().feed(text.encode() + b"\n\n"):
        if data := read_data(event):
            payload = parse_json(data)
            return {"error": payload or data.decode()} if _ERROR_NAME.search(event) else payload
    return None


# What a provider may call its errors. A number says no more than the status does.
_ERROR_CODE: Final = re.compile(r"(?=[0-9_.-]*[A-Za-z])[A-Za-z0-9_.-]{1,64}")


def find_error_code(body: bytes, content_encoding: str = "") -> str:
    """Returns the `code`, else the `type`, of the error in a body, such as `insufficient_quota`.

    Only a short identifier counts: up to 64 letters, digits, `_`, `.` and `-`, with a letter among them.
    Returns an empty text if there is none. Takes the same arguments as `parse_overflow`.
    """
    payload = as_object(parse_json((_decode_text(body, content_encoding) or "").encode()))
    error = as_object(payload.get("error")) or payload
    names = (error.get("code"), error.get("type"))
    return next((name for name in names if isinstance(name, str) and _ERROR_CODE.fullmatch(name)), "")


_NULL: Final = msgspec.Raw(b"null")


class _FailedResponse(msgspec.Struct, gc=False):
    error: msgspec.Raw = _NULL


class _ErrorEvent(msgspec.Struct, gc=False):
    """The fields of an event that can describe an error. The decoder skips all other fields."""

    type: str = ""
    error: msgspec.Raw = _NULL
    response: _FailedResponse | None = None


_ERROR_EVENT: Final = msgspec.json.Decoder(_ErrorEvent)


def condense_error_event(stream: bytes) -> bytes:
    """Returns a stream's first event with only the fields that describe an error.

    The result lacks all other fields, because some events repeat the whole request in them. Returns no bytes
    if the data of the event is not a JSON object.
    """
    event = next(iter(EventSplitter().feed(stream)), b"")
    try:
        return b"data: %b\n\n" % msgspec.json.encode(_ERROR_EVENT.decode(read_data(event)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return b""


def parse_overflow(status: int, body: bytes, content_encoding: str = "") -> Overflow | None:
    """Parses an error that says that a request is too large. Returns None for all other responses.

    Args:
        status: The upstream's status. With 200, the body counts as an error only if it contains no reply.
        body: The whole body as sent. If it has more than 64 KiB, before or after decoding, returns None.
        content_encoding: The `content-encoding` of the body. Codings other than gzip and deflate are not
            supported; the result is then None.
    """
    if status not in _STATUSES:
        return None
    text = _decode_text(body, content_encoding)
    if not text:
        return None
    if text.startswith(_STREAM_STARTS):
        payload = _read_event_payload(text)
    elif text[0] in _JSON_STARTS:
        payload = parse_json(text.encode())
    else:
        payload = text
    overflow = _classify_error_texts(
        status, _iter_error_texts(_find_failure(payload) if status == 200 else payload)
    )
    if status in _UNSIZED_STATUSES and overflow == Overflow("context"):
        return replace(overflow, is_size_meaningful=False)
    return overflow

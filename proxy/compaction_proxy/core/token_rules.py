"""How the tokens of a request add up: framing around texts that a counter has counted.

A message is taken apart into pieces, the pieces are counted elsewhere (off the loop, cached), and the counts
are put together here. Sources: OpenAI's cookbook for the chat framing (3 a message, 1 a name, 3 to prime the
reply; exact for plain text on the models it names), seeds/004 for the character rule.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from compaction_proxy.core.json_bounds import has_too_many_brackets
from compaction_proxy.core.message import Message

# One token each in both vocabularies that we ship.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


@dataclass(frozen=True, slots=True)
class TokenRule:
    """How counts become the size of messages and requests, in tokens.

    Attributes:
        message: Added for every message.
        role: Added for the role's own token; a role nobody knows is a piece and counted as text.
        name: Added where a message has a name, besides the name itself.
        reply: Added once a request, for the start of the answer.
        whole: Whether refusal, name and role count; otherwise only text, tool names and arguments do.
    """

    message: int
    role: int
    name: int
    reply: int
    whole: bool


TIKTOKEN = TokenRule(message=3, role=1, name=1, reply=3, whole=True)
CHARACTERS = TokenRule(message=2, role=0, name=0, reply=0, whole=False)
RULES = {"tiktoken": TIKTOKEN, "characters": CHARACTERS}


def list_countable_texts(message: Message, rule: TokenRule = TIKTOKEN) -> tuple[str, ...]:
    """The texts of a message that must be counted one by one, none of them empty.

    Content that is not text is no piece: the dialect knows its price (`core.media`). Ids are not counted: no
    model is shown them as text.
    """
    texts = [message.text]
    for call in message.calls:
        texts += (call.name, call.arguments)
    if rule.whole:
        texts += [message.refusal, message.name, "" if message.role in _ROLES else message.role]
    return tuple(filter(None, texts))


def sum_message_tokens(
    message: Message, counts: Iterable[int], rule: TokenRule = TIKTOKEN, part_tokens: int = 0
) -> int:
    """Size of one message, before calibration.

    Args:
        message: The message.
        counts: Tokens of its `list_countable_texts`, in any order.
        rule: The framing that belongs to the counter.
        part_tokens: Tokens of its content that is not text. Seeds/004 knows none; they are added under both
            rules, because an image that weighs nothing would overflow the window.
    """
    role = rule.role if message.role in _ROLES else 0
    name = rule.name if message.name else 0
    return rule.message + role + name + sum(counts) + part_tokens


def minify_definition(text: str | bytes) -> str:
    """What to count for `tools`, `functions` or `response_format`: their JSON text without its white space.

    Open models' chat templates show the model this very JSON. OpenAI renders tools in a form of its own, for
    which its cookbook has a formula; over the 22 distinct tool sets of seven public agent data sets (1 to 37
    tools) the JSON has 1.32 times its tokens (median; least 1.10, most 1.77): never less, and calibration
    takes up the rest. Text that does not parse, or is crowded (`json_bounds`), is counted as it is.
    """
    text = text if isinstance(text, str) else text.decode("utf-8", "replace")
    if has_too_many_brackets(text):
        return text
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text

"""Reads the values in messages, and judges what a context holds of them. Nothing of the proxy is used.

A value is a URL, a path, the name of a file, an address of mail, a name in `snake_case` or `camelCase`, or a
token with a digit and a letter or sign: an id, an amount, a date. A bare number needs four digits. Names of
libraries (`json.dumps`) are no values, because models know them without the conversation.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

JsonObject = dict[str, Any]
Interval = tuple[float, float]

DRAWS = 1_000
# Fewer conversations than this say nothing of others; then cuts are drawn.
LEAST_CONVERSATIONS = 8
_TOKEN = re.compile(r"https?://[^\s\"'<>()\[\]{}`,;]+|[\w~./@$€£+:-]*(?:(?<=\d),(?=\d{3}\b)[\w./-]*)*\w%?")
_FILES = (
    "bash|c|cc|cfg|conf|cpp|cs|css|csv|db|diff|env|go|h|hpp|html|ini|ipynb|java|js|json|jsonl|jsx|kt|lock|log|"
    "lua|m4v|md|mpeg|avi|pdf|php|png|pony|py|rb|rs|rst|scm|sh|sql|svg|swift|toml|ts|tsv|tsx|txt|xml|yaml|yml|zip"
)
_VALUE = re.compile(
    r"https?://\S+|\S+@\S+\.\w+"
    r"|[~.]{0,2}/?(?:[\w.@+-]+/)+[\w.@+-]*\.[A-Za-z]\w{0,7}|[~.]{0,2}/(?:[\w.@+-]+/)*[\w.@+-]{2,}"
    rf"|[\w.@+-]+(?:/[\w.@+-]+){{2,}}|[\w-]+\.(?:{_FILES})"
    r"|\w*[A-Za-z0-9]_[A-Za-z0-9]\w*|\w*[a-z][A-Z]\w*"
    r"|(?=\S*\d)(?=\S*[^\d.])\S{3,}|(?:\d\.?){4,}"
)


def read_text(message: Mapping[str, Any]) -> str:
    """The content of a message, and the arguments of its calls, a line for each."""
    held = message.get("content") or ""
    if isinstance(held, list):
        held = "\n".join(str(part.get("text", "")) for part in held)
    lines = [held]
    for call in message.get("tool_calls") or ():
        name, given = call["function"]["name"], call["function"]["arguments"]
        lines += [f"{name} {names}: {text}" for names, text in read_leaves(_parse_json(given))]
    return "\n".join(filter(None, lines))


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_leaves(node: object, names: str = "") -> Iterator[tuple[str, str]]:
    """The scalars of a tree, each with the keys above it."""
    if isinstance(node, Mapping):
        for key, held in node.items():
            yield from read_leaves(held, f"{names} {key}".strip())
    elif isinstance(node, list):
        for held in node:
            yield from read_leaves(held, names)
    elif node is not None:
        yield names, node if isinstance(node, str) else json.dumps(node)


def read_keys(arguments: str) -> list[str]:
    """The names of the arguments of a call, inner ones too."""
    return [names for names, _ in read_leaves(_parse_json(arguments))]


def is_fixed(message: Mapping[str, Any]) -> bool:
    """Whether a message is part of every context."""
    return message["role"] in {"system", "developer"}


def read_contents(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of the messages that are not part of every context."""
    return [read_text(each) for each in messages if not is_fixed(each)]


def find_values(text: str) -> list[str]:
    """The values of a text, in its order, each once."""
    tokens = (token.strip("-:.+").removeprefix("./") for token in _TOKEN.findall(text))
    return list(dict.fromkeys(token for token in tokens if _VALUE.fullmatch(token)))


def has_value(text: str, value: str) -> bool:
    """Whether a text holds a value that no letter and no digit continues."""
    return value in text and bool(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text))


def keep_end(texts: Sequence[str], characters: int) -> str:
    """The last characters of a conversation."""
    kept: list[str] = []
    for text in reversed(texts):
        if characters <= 0:
            break
        kept.append(text[-characters:])
        characters -= len(text) + 1
    return "\n".join(reversed(kept))


def keep_newest(texts: Sequence[str], tokens: Sequence[int], budget: int) -> str:
    """The newest whole messages of a conversation within a number of tokens."""
    kept: list[str] = []
    for text, count in zip(reversed(texts), reversed(tokens), strict=True):
        budget -= count
        if budget < 0:
            break
        kept.append(text)
    return "\n".join(reversed(kept))


def find_share(counts: Sequence[tuple[float, float]]) -> float | None:
    """The share of all hits among all cases; None: there are no cases."""
    of = sum(cases for _, cases in counts)
    return sum(hits for hits, _ in counts) / of if of else None


def find_interval(groups: Mapping[str, Sequence[tuple[float, float]]], seed: int) -> Interval | None:
    """The 95 % interval of a share by the bootstrap: whole conversations are drawn, with replacement.

    Args:
        groups: Hits and cases of each cut or question, by conversation. Of few conversations, cuts are drawn.
        seed: Of the draws.
    """
    units = [(sum(h for h, _ in each), sum(n for _, n in each)) for each in groups.values()]
    if len(units) < LEAST_CONVERSATIONS:
        units = [count for each in groups.values() for count in each]
    units = [each for each in units if any(each)]
    if not units:
        return None
    rng = random.Random(seed)
    draws = (find_share(rng.choices(units, k=len(units))) for _ in range(DRAWS))
    ordered = sorted(share for share in draws if share is not None)
    return ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered))]

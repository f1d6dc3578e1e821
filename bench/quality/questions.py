"""Makes questions with one exact short answer from what a conversation holds so far. No model is needed.

| kind | the question asks for | the answer is |
| --- | --- | --- |
| value | a key of the result of one call | the same in all results of that call |
| revised | likewise | another one than in an earlier result |
| id | an argument of all calls of a tool that reads | the only one |
| done | an argument of all calls of a tool that writes | the only one |
| open | which id was looked up, but never given to a tool that writes | the only one of two or more |
| path | the path of a file, by its name | the only path of that name |
| rule | a gap in a sentence of the user with "must", "never", "only" and the like | what stood there |
| said | a gap in another sentence of the user | what stood there |
| asked | a question that came with the conversation | quoted in the message of its evidence |
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from quality.judge import JsonObject, find_values, has_value, is_fixed, read_contents, read_leaves, read_text

SHORTEST, LONGEST = 3, 60
ANSWER_WORDS = 5
SENTENCE_WORDS, SENTENCE_CHARACTERS = 5, 240
PASSAGE_CHARACTERS = 1_000
_READS = re.compile(
    r"^(?:get|list|search|find|read|view|show|check|calculate|think|ls|cat|grep|cd|pwd|open|goto|scroll)"
)
_RULE = re.compile(r"\b(?:must|never|always|don.?t|do not|only|no longer|make sure)\b", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a conversation.

    Attributes:
        kind: See the top of this file.
        text: What is asked.
        answer: The only right answer, as the conversation writes it.
        stale: What was the answer before.
        sources: The indexes of the messages that tell the answer as the question asks for it.
    """

    kind: str
    text: str
    answer: str
    stale: tuple[str, ...]
    sources: tuple[int, ...]


def read_calls(messages: Sequence[JsonObject]) -> Iterator[tuple[int, str, JsonObject, int]]:
    """Each call: its index, tool and arguments, and the index of its result."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or (), 1):
            try:
                given = json.loads(call["function"]["arguments"])
            except ValueError:
                continue
            answer = index + number
            has_answer = answer < len(messages) and messages[answer]["role"] == "tool"
            if isinstance(given, dict) and has_answer:
                yield index, call["function"]["name"], given, answer


def _ask_values(messages: Sequence[JsonObject]) -> Iterator[Question]:
    found: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for _, tool, given, answer in read_calls(messages):
        try:
            result = json.loads(str(messages[answer].get("content")))
        except ValueError:
            continue
        call = f"{tool}({', '.join(f'{key}={held}' for key, held in given.items())})"
        leaves = list(read_leaves(result)) if isinstance(result, dict) and len(call) <= 2 * LONGEST else []
        counts = defaultdict(list)
        for names, text in leaves:
            counts[names].append(text)
        for names, texts in counts.items():
            if len(texts) == 1 and names:
                found[call, names].append((answer, texts[0]))
    for (call, names), told in found.items():
        texts = list(dict.fromkeys(text for _, text in told))
        sources = tuple(index for index, text in told if text == told[-1][1])
        stale = tuple(text for text in texts if text != told[-1][1])
        yield Question(
            "revised" if stale else "value",
            f"What is `{names}` in the latest result of {call}?",
            told[-1][1],
            stale,
            sources,
        )


def _ask_arguments(messages: Sequence[JsonObject]) -> Iterator[Question]:
    given: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, tool, arguments, _ in read_calls(messages):
        for key, held in arguments.items():
            if isinstance(held, str):
                given[tool, key][held].append(index)
    for (tool, key), values in given.items():
        if len(values) == 1:
            [(answer, sources)] = values.items()
            kind = "id" if _READS.match(tool) else "done"
            text = f"Which `{key}` did the assistant give to `{tool}`?"
            yield Question(kind, text, answer, (), tuple(sources))
    for key in sorted({key for _, key in given}):
        of_key = [(tool, values) for (tool, name), values in given.items() if name == key]
        read = {value: each[value] for tool, each in of_key if _READS.match(tool) for value in each}
        written = {value for tool, each in of_key if not _READS.match(tool) for value in each}
        left = [value for value in read if value not in written]
        if len(left) == 1 and written & set(read):
            text = f"Which `{key}` did the assistant look up, but give to no tool that changes something?"
            yield Question("open", text, left[0], (), tuple(read[left[0]]))


def _ask_paths(messages: Sequence[JsonObject]) -> Iterator[Question]:
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, message in enumerate(messages):
        for value in find_values(read_text(message)):
            if "/" in value and "://" not in value and re.search(r"/[\w-]+\.[A-Za-z]\w{0,4}$", value):
                found[value.rpartition("/")[2]][value].append(index)
    for name, paths in found.items():
        if len(paths) == 1:
            [(path, sources)] = paths.items()
            yield Question("path", f"What is the whole path of the file {name}?", path, (), tuple(sources))


def _ask_gaps(messages: Sequence[JsonObject]) -> Iterator[Question]:
    for index, message in enumerate(messages):
        if message["role"] != "user":
            continue
        for sentence in _SENTENCE.split(read_text(message)):
            values = find_values(sentence)
            is_sentence = len(sentence.split()) >= SENTENCE_WORDS and len(sentence) <= SENTENCE_CHARACTERS
            if not (values and is_sentence and sentence[0].isalpha()):
                continue
            gap = re.sub(rf"(?<!\w){re.escape(values[0])}(?!\w)", "___", sentence)
            kind = "rule" if _RULE.search(sentence) else "said"
            yield Question(kind, f'The user wrote: "{gap}". What stood at ___?', values[0], (), (index,))


def _ask_given(messages: Sequence[JsonObject], asked: Sequence[Mapping[str, Any]]) -> Iterator[Question]:
    for each in asked:
        answer, sources = str(each["answer"]), tuple(each["evidence_msgs"] or ())
        is_shown = bool(sources) and max(sources) < len(messages)
        if is_shown and not each.get("adversarial") and len(answer.split()) <= ANSWER_WORDS:
            told = [index for index in sources if has_value(read_text(messages[index]), answer)]
            if told:
                yield Question("asked", each["question"], answer, (), tuple(told))


def is_sound(question: Question, messages: Sequence[JsonObject]) -> bool:
    """Whether the full text holds the answer where its sources are, and the question does not tell it."""
    answer = question.answer
    is_short = SHORTEST <= len(answer) <= LONGEST and "\n" not in answer
    is_word = answer.casefold() not in {"true", "false", "null", "none"}
    is_told = bool(question.sources) and all(
        has_plain_value(read_text(messages[index]), answer) for index in question.sources
    )
    is_hidden = not has_value(question.text.casefold(), answer.casefold())
    overlaps = any(has_value(old, answer) or has_value(answer, old) for old in question.stale)
    return is_short and is_word and is_told and is_hidden and not overlaps


def has_plain_value(text: str, value: str) -> bool:
    """Whether a text holds a value, whatever the case, the spaces and the escapes."""
    plain = [" ".join(each.replace('\\"', '"').split()).casefold() for each in (text, value)]
    return has_value(*plain)


def make_questions(
    messages: Sequence[JsonObject], asked: Sequence[Mapping[str, Any]], most: int, seed: str
) -> list[Question]:
    """At most so many questions about the messages so far, of each kind in turn.

    Answers that occur in a system prompt are left out, and no two questions have the same answer.
    """
    fixed = "\n".join(read_text(each) for each in messages if is_fixed(each))
    makers = (_ask_values(messages), _ask_arguments(messages), _ask_paths(messages), _ask_gaps(messages))
    kinds: dict[str, list[Question]] = defaultdict(list)
    for question in chain(*makers, _ask_given(messages, asked)):
        if is_sound(question, messages) and not has_value(fixed, question.answer):
            kinds[question.kind].append(question)
    rng = random.Random(seed)
    drawn: dict[str, Question] = {}
    for kind in sorted(kinds):
        rng.shuffle(kinds[kind])
    for question in chain(*zip_longest(*(kinds[kind] for kind in sorted(kinds)))):
        if question is not None and len(drawn) < most:
            drawn.setdefault(question.answer, question)
    return list(drawn.values())


def find_passage(messages: Sequence[JsonObject], question: Question) -> str:
    """What the latest source says around the answer, with the call that it answers."""
    index = question.sources[-1]
    text = read_text(messages[index])
    place = max(0, text.casefold().find(question.answer.casefold()) - PASSAGE_CHARACTERS // 2)
    before = read_contents([messages[index - 1]])[-1:] if messages[index]["role"] == "tool" else []
    return "\n".join(
        [*(each[-PASSAGE_CHARACTERS:] for each in before), text[place : place + PASSAGE_CHARACTERS]]
    )

"""What known clients write in a user's name and no user has said: examples, files, maps of a repository.

None of it is the task, and no rule is quoted from it. A form counts only where it is exact; in doubt a
message is the user's own.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compaction_proxy.core.message import Message, Span

# How OpenAI's guides name the messages of few-shot examples.
EXAMPLE_NAMES = frozenset({"example_user", "example_assistant"})


class _MessagePair(NamedTuple):
    """How a message of a user begins, and how the answer that the client wrote itself does."""

    asked: str
    answered: str


# The examples of aider's edit formats (aider-chat 0.86, `example_messages` of `aider/coders/*_prompts.py`).
_EDIT_EXAMPLES = (
    _MessagePair(
        "Change get_factorial() to use math.factorial",
        "To make this change we need to modify `mathweb/flask/app.py`",
    ),
    _MessagePair(
        "Refactor hello() into its own file.", "To make this change we need to modify `main.py` and "
    ),
)
_EXAMPLES = (
    _EDIT_EXAMPLES,
    (_MessagePair("Replace is_prime with a call to sympy.", "Ok, I will:\n\n1. Add an imports of sympy."),),
    (_MessagePair("Change the greeting to be more casual", "Ok, I will:\n\n1. Switch the greeting text "),),
)
# What closes them (`format_chat_chunks` of `aider/coders/base_coder.py`).
_EXAMPLES_END = (
    "I switched to a new code base. Please don't consider the above files or try to edit them any longer."
)
_END_REPLY = "Ok."
# A model without a system prompt is given it as the first message of a user, which is answered.
_LAST_START = 2
# What aider shows of the repository, with the answers that it writes itself (`aider/coders/*_prompts.py`).
_FILES = (
    _MessagePair(
        "I have *added these files to the chat* so you can go ahead and edit them.",
        "Ok, any changes I propose will be to those files.",
    ),
    _MessagePair(
        "I have *added these files to the chat* so you see all of their contents.",
        "Ok, I will use that as the true, current contents of the files.",
    ),
)
_SHOWN = (
    *_FILES,
    _MessagePair(
        "Here are summaries of some files present in my git repository.",
        "Ok, I won't try and edit those files without asking first.",
    ),
    _MessagePair(
        "I am working with you on code in a git repository.\nHere are summaries of some files present",
        "Ok, I won't try and edit those files without asking first.",
    ),
    _MessagePair(
        "Here are some READ ONLY files, provided for your reference.",
        "Ok, I will use these files as references.",
    ),
)
_REPLIES = frozenset(pair.answered for pair in _SHOWN)
_OPENINGS = tuple(dict.fromkeys(pair.asked for pair in _SHOWN))
# Behind files stands the current turn, with a few answers and what aider says to them itself: so far from the
# end of the list they stand at most, in messages.
_LAST_MESSAGES = 16


def find_user_messages(messages: Sequence[Message]) -> Iterator[int]:
    """Yields the indices of what users have said themselves, in order.

    Left out are messages that answer calls, instructions of a project, examples, and files that are shown.
    """
    examples = _find_examples(messages)
    for index, each in enumerate(messages):
        if each.role != "user" or each.answers or each.instruction is not None or each.name in EXAMPLE_NAMES:
            continue
        if examples.start <= index < examples.stop or _is_shown(messages, index, _SHOWN):
            continue
        yield index


def find_files_message(messages: Sequence[Message]) -> int | None:
    """Returns the index of the message with which aider shows files near the end; None if there is none.

    It stands in front of the current turn. With the next turn it stands further back, and shows the files as
    they are then.
    """
    first = max(0, len(messages) - _LAST_MESSAGES)
    return next((k for k in range(first, len(messages)) if _is_shown(messages, k, _FILES)), None)


def drop_client_messages(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages without a client's examples, its files and its own answers to these."""
    examples = _find_examples(messages)
    gone = {k for k in range(len(messages)) if _is_shown(messages, k, _SHOWN)}
    gone |= {k for k, each in enumerate(messages) if each.role == "assistant" and each.text in _REPLIES}
    gone |= set(range(examples.start, examples.stop))
    return [each for k, each in enumerate(messages) if k not in gone]


def _find_examples(messages: Sequence[Message]) -> Span:
    """The examples that aider puts in front of a conversation; an empty span if there are none."""
    for start in (0, _LAST_START):
        for pairs in _EXAMPLES:
            stop = start + 2 * len(pairs)
            closed = _is_pair(messages, stop, _EXAMPLES_END, _END_REPLY)
            if closed and all(_is_example(messages, start + 2 * k, pair) for k, pair in enumerate(pairs)):
                return Span(start, stop + 2)
    return Span(0, 0)


def _is_example(messages: Sequence[Message], index: int, pair: _MessagePair) -> bool:
    answered = messages[index + 1]
    return answered.text.startswith(pair.answered) and _is_pair(messages, index, pair.asked, answered.text)


def _is_shown(messages: Sequence[Message], index: int, pairs: Sequence[_MessagePair]) -> bool:
    """Whether a message shows files or a map of them, in one of these forms, with the client's own answer."""
    text = messages[index].text
    if not text.startswith(_OPENINGS):
        return False
    written = (each for each in pairs if text.startswith(each.asked))
    return any(_is_pair(messages, index, text, each.answered) for each in written)


def _is_pair(messages: Sequence[Message], index: int, asked: str, answered: str) -> bool:
    """Whether these are the texts of a user's message and the answer behind it."""
    if index + 1 >= len(messages):
        return False
    first, second = messages[index], messages[index + 1]
    roles = (first.role, second.role) == ("user", "assistant")
    return roles and not second.calls and (first.text, second.text) == (asked, answered)

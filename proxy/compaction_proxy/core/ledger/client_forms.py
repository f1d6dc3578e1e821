"""Finds messages that known clients write in the user's name: examples, files, repository maps and results.

None of these messages is the task, and the ledger quotes no rule from them. A message is recognised only by a
known text or a known participant name. Every other message counts as written by the user.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compaction_proxy.core.message import Message, Span

# Names that OpenAI's guides give to the messages of few-shot examples.
EXAMPLE_NAMES = frozenset({"example_user", "example_assistant"})


class _MessagePair(NamedTuple):
    """A user message and the reply to it, both written by the client.

    Attributes:
        user_text: The text with which the user message begins.
        answer_text: The text of the reply. In an example, the text with which the reply begins.
    """

    user_text: str
    answer_text: str


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
# The user message and the reply with which aider ends its examples (`format_chat_chunks` of
# `aider/coders/base_coder.py`).
_EXAMPLES_END = (
    "I switched to a new code base. Please don't consider the above files or try to edit them any longer."
)
_END_REPLY = "Ok."
# Aider puts examples before a conversation. If a model takes no system prompt, aider sends the prompt as the
# first user message and adds a reply. The examples then begin at this index.
_START_AFTER_PROMPT = 2
# The user messages in which aider shows the repository, and the replies that aider itself writes to them
# (`aider/coders/*_prompts.py`).
_FILE_FORMS = (
    _MessagePair(
        "I have *added these files to the chat* so you can go ahead and edit them.",
        "Ok, any changes I propose will be to those files.",
    ),
    _MessagePair(
        "I have *added these files to the chat* so you see all of their contents.",
        "Ok, I will use that as the true, current contents of the files.",
    ),
)
_FILE_AND_MAP_FORMS = (
    *_FILE_FORMS,
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
_REPLIES = frozenset(pair.answer_text for pair in _FILE_AND_MAP_FORMS)
_MAX_REPLY_CHARACTERS = max(map(len, _REPLIES))
_OPENINGS = tuple(dict.fromkeys(pair.user_text for pair in _FILE_AND_MAP_FORMS))
# The beginnings of results that clients write as user messages, because their models call no tools: reports
# of aider on edits, on its linter and on commands (`aider/coders/*_coder.py`, `aider/linter.py`,
# `aider/prompts.py`), and results of tools in Cline, Roo Code, OpenHands, SWE-agent, smolagents and AutoGen.
_RESULT = re.compile(
    r"# \d{1,4} SEARCH/REPLACE blocks? failed to match!\n|"
    r"UnifiedDiffNo(?:Match|tUnique): hunk failed to apply!\n|# Fix any errors below, if possible\.\n|"
    r"I ran this command:\n\n[^\n]{1,2000}\n\nAnd got this output:\n|"
    r"\[[a-z_]{1,60}(?: for '[^\n]{0,2000})?\] Result:|EXECUTION RESULT of \[[^\n]{1,80}\]:\n|"
    r"(?:OBSERVATION|Observation):\n|exitcode: \d{1,3} \([^\n]{1,60}\)\nCode output:|"
    r"<returncode>\d{1,3}</returncode>\n"
)
# Tags in which other clients write results. A message that ends with such a tag has no words of the user.
_RESULT_TAGS = ("tool_response", "tool_result", "function_results", "function_response")
_RESULT_STARTS = tuple(f"<{tag}{end}" for tag in _RESULT_TAGS for end in "> \n")
_RESULT_ENDS = tuple(f"</{tag}>" for tag in _RESULT_TAGS)
# With these marks, Cline and Roo Code quote the user inside of a result.
_USER_QUOTES = ("<answer>", "<feedback>", "<user_message>")
# The message in which aider shows files is searched for among this many last messages. Only the current turn
# follows that message: a few replies of the model, and the messages that aider sends back to the model.
_LAST_MESSAGES = 16


def is_client_result(message: Message) -> bool:
    """Returns whether a message is a result that its client wrote as a user message.

    A result that quotes the user counts as a message of the user.
    """
    text = message.text
    if message.role != "user":
        return False
    if text.startswith(_RESULT_STARTS):
        return text.rstrip().endswith(_RESULT_ENDS)
    return _RESULT.match(text) is not None and not any(mark in text for mark in _USER_QUOTES)


def find_user_messages(messages: Sequence[Message]) -> Iterator[int]:
    """Yields the indices of the messages that users wrote themselves, in order.

    Results of calls, project instructions, examples, and messages in which aider shows files or a repository
    map are left out. So are results that a client writes as user messages, unless they quote the user.
    """
    examples = _find_examples(messages)
    for index, message in enumerate(messages):
        if (
            message.role != "user"
            or message.answered_call_ids
            or message.instruction is not None
            or message.name in EXAMPLE_NAMES
            or is_client_result(message)
        ):
            continue
        if examples.start <= index < examples.stop or _begins_client_pair(
            messages, index, _FILE_AND_MAP_FORMS
        ):
            continue
        yield index


def find_shown_files_message(messages: Sequence[Message]) -> int | None:
    """Returns the index of the message with which aider shows files to the model, or None if there is none.

    Only the last messages are searched, because aider places this message just before the current turn. In
    the next turn, aider moves the message closer to the end and updates the files in it.
    """
    first = max(0, len(messages) - _LAST_MESSAGES)
    return next(
        (k for k in range(first, len(messages)) if _begins_client_pair(messages, k, _FILE_FORMS)), None
    )


def drop_client_messages(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages without those that the client wrote.

    Examples, messages that show files or a repository map, and the replies to all of these are left out.
    """
    examples = _find_examples(messages)
    gone = {k for k in range(len(messages)) if _begins_client_pair(messages, k, _FILE_AND_MAP_FORMS)}
    gone |= {k for k, each in enumerate(messages) if each.role == "assistant" and _is_reply(each.text)}
    gone |= set(range(examples.start, examples.stop))
    return [each for k, each in enumerate(messages) if k not in gone]


def _is_reply(text: str) -> bool:
    return len(text) <= _MAX_REPLY_CHARACTERS and text in _REPLIES  # the hash of a long text takes long


def _find_examples(messages: Sequence[Message]) -> Span:
    """Returns the span of the examples that aider puts before a conversation.

    Returns an empty span if there are none.
    """
    for start in (0, _START_AFTER_PROMPT):
        for pairs in _EXAMPLES:
            stop = start + 2 * len(pairs)
            closed = _is_pair(messages, stop, _EXAMPLES_END, _END_REPLY)
            if closed and all(_is_example(messages, start + 2 * k, pair) for k, pair in enumerate(pairs)):
                return Span(start, stop + 2)
    return Span(0, 0)


def _is_example(messages: Sequence[Message], index: int, pair: _MessagePair) -> bool:
    answered = messages[index + 1]
    return answered.text.startswith(pair.answer_text) and _is_pair(
        messages, index, pair.user_text, answered.text
    )


def _begins_client_pair(messages: Sequence[Message], index: int, forms: Sequence[_MessagePair]) -> bool:
    """Returns whether the message at `index` and the next one form one of the pairs in `forms`.

    The user message need only begin with the user text of the pair.
    """
    text = messages[index].text
    if not text.startswith(_OPENINGS):
        return False
    written = (each for each in forms if text.startswith(each.user_text))
    return any(_is_pair(messages, index, text, each.answer_text) for each in written)


def _is_pair(messages: Sequence[Message], index: int, user_text: str, answer_text: str) -> bool:
    """Returns whether the message at `index` and the next one have exactly these texts.

    The first must be a user message, and the second an assistant message without calls.
    """
    if index + 1 >= len(messages):
        return False
    first, second = messages[index], messages[index + 1]
    roles = (first.role, second.role) == ("user", "assistant")
    return roles and not second.calls and (first.text, second.text) == (user_text, answer_text)

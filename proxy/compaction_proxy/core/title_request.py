"""Recognises side requests: requests that a client sends besides a conversation, such as for its title."""

import re

# Number of characters that are searched at each end of a text. A side request, such as a request for a title,
# states there what it asks for. The rest of the text may be a quoted conversation.
EDGE_CHARACTERS = 600
_VERB = (
    r"\b(?:generate|create|write|provide|suggest|give|make|produce|extract|come up with"
    r"|(?:reply|respond|answer) (?:\w+ )?with)\b"
)
_NOUN = r"\b(?:titles?|headline|tags|follow-up (?:questions|prompts))\b"
_OBJECT = r"\b(?:conversation|chat|session|thread|discussion|dialogue)\b"
_OF_CONVERSATION = re.compile(
    rf"{_VERB}[^.]{{0,80}}{_NOUN}[^.]{{0,120}}{_OBJECT}"
    rf"|{_VERB}[^.]{{0,80}}{_OBJECT} {_NOUN}"
    r"|\bdescription of this session in \w+ words",
    re.IGNORECASE,
)
_OF_ANYTHING = re.compile(rf"{_VERB}[^.]{{0,80}}\btitles?\b|\btitle (?:generator|writer)\b", re.IGNORECASE)
# The first words of the system prompts that known clients use for side requests: those of aider for a commit
# message and for a summary of its history (aider-chat 0.86, `aider/prompts.py`), and those of pi 0.87 and
# opencode 1.18 for a summary.
_BESIDE = (
    "You are an expert software engineer that generates concise, one-line Git commit messages",
    "*Briefly* summarize this partial conversation about programming.",
    "You are a context summarization ",
)


def is_title_request(text: str) -> bool:
    """Returns whether a user message asks for a conversation's title, for tags or for follow-up questions."""
    return any(map(_OF_CONVERSATION.search, (text[:EDGE_CHARACTERS], text[-EDGE_CHARACTERS:])))


def is_title_or_side_prompt(text: str) -> bool:
    """Returns whether a system prompt asks for titles, or is a prompt that a known side request uses."""
    return is_side_request_prompt(text) or _OF_ANYTHING.search(text[:EDGE_CHARACTERS]) is not None


def is_side_request_prompt(text: str) -> bool:
    """Returns whether a system prompt begins like one that a known client uses for side requests."""
    return text.startswith(_BESIDE)

"""Text that others wrote, made harmless before a model reads it as data.

What is done changes how a text looks as little as possible: marks that a chat template, a fence of ours or a
stand-in of ours is made of are broken up by one character, and what nobody can see is taken out.
"""

import re

# Control characters but tab and newline; marks of direction and width that nobody sees; fillers; and the
# "tag" characters and chains of variation selectors that smuggle text past a reader. The joiners U+200C and
# U+200D stay: Persian and Hindi are written with them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]|[\ufe00-\ufe0f]{2,}"
)
# The first character of what a chat template might take for its own.
_TEMPLATE = re.compile(
    r"<(?=\||\uff5c|<\s*/?\s*sys\s*>>|(?:/\s*)?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn|start_of_image|"
    r"im_start|im_end|think|thinking|tool_call|tool_response|function_calls)\s*>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\])",
    re.IGNORECASE,
)
# What a fence of ours looks like (`core.summary.transcript`): a tag with a name, a hyphen and hex digits; or
# what one might be guessed to look like.
_FENCE = re.compile(
    r"<(?=(?:/\s*)?(?:[\w-]{1,40}-[0-9a-f]{6,}\b|(?:transcript|system|developer|assistant|user|task|run|data|"
    r"instructions?|conversation)(?:[-_][\w-]{0,40})?\s*>))",
    re.IGNORECASE,
)
_FRAME = re.compile(
    r"\[(?=previous\s{1,8}conversation\s{1,8}summary|"
    r"end\s{1,8}of\s{1,8}(?:the\s{1,8})?(?:summary|record|what\s{1,8}was\s{1,8}carried)|"
    r"record\s{1,8}\d{1,9}\s{1,8}of\s{1,8}the\s{1,8}earlier|summary\s{1,8}of\s{1,8}the\s{1,8}earlier|"
    r"carried\s{1,8}over\s{1,8}from\s{1,8}the\s{1,8}earlier)"
    r"|<(?=(?:/\s*)?summary\s*>)",
    re.IGNORECASE,
)
# Lines that would read as a message of the transcript, the mark of a run, or a heading that is ours; those of
# the ledger and of the last request in whatever emphasis.
_LINE = re.compile(
    r"^(?=\[\d+\] [A-Z]+(?: \([^)\n]*\))?:|={2,}[ \t]*RUN\b|#{1,6}[ \t]+(?:session summary|previous summary|"
    r"original (?:user )?task|messages to summarize|runs to summarize|size and language)\b|"
    r"[#>*_ \t-]{0,12}(?:rules of the user|(?:open requests|decisions and preferences|told by the user|"
    r"also said by the user|observed in tool output|last request from user)\b[^\n:]{0,60}:))",
    re.IGNORECASE | re.MULTILINE,
)


def remove_invisible(text: str) -> str:
    """The text without what nobody can see, its line ends as newlines."""
    return _UNSEEN.sub("", text.replace("\r\n", "\n"))


def escape_template_marks(text: str) -> str:
    """The text with the marks of chat templates broken up by a space."""
    return _TEMPLATE.sub(lambda found: f"{found[0]} ", text)


def escape_frames(text: str) -> str:
    """The text with what could begin or end a frame of ours broken up by a space."""
    return _FRAME.sub(lambda found: f"{found[0]} ", text)


def escape_frames_and_headings(text: str) -> str:
    """The text without frames of ours, and without lines that would read as headings or messages of ours."""
    return _LINE.sub(r"\\", escape_frames(text))


def sanitize_text(text: str) -> str:
    """A message's text, or an earlier summary, as it may stand inside a fence.

    It holds no mark of a chat template, nothing that looks like a fence or a frame of ours, no line that
    reads as another message, and no unseen character. Doing it twice changes nothing more.
    """
    return escape_frames_and_headings(_FENCE.sub("< ", escape_template_marks(remove_invisible(text))))

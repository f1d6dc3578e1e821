"""Makes text of users, tools and models harmless before a model reads it as data.

The text changes as little as possible. One character is inserted into each control token of a chat template,
each tag of a fence (a pair of tags around quoted text), and each phrase that begins or ends a frame (the text
around a summary or record). Invisible characters are removed.
"""

import re

# Invisible characters: control characters except tab and newline, characters for direction and width, and
# fillers. The "tag" characters and sequences of variation selectors, which can hide text from a reader, also
# belong to them. The joiners U+200C and U+200D, and single variation selectors, do so only after a letter of
# ASCII: Persian and Hindi are written with joiners, and selectors follow emoji.
_UNSEEN_CHARACTERS = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff"
)
_UNSEEN = re.compile(
    rf"(?<=[A-Za-z \[\]</>])[{_UNSEEN_CHARACTERS}\u200c\u200d\ufe00-\ufe0f]+|"
    rf"[{_UNSEEN_CHARACTERS}]|[\ufe00-\ufe0f]{{2,}}"
)
# The first character of a text that a chat template might take for one of its own control tokens, such as
# `<|im_start|>`.
_TEMPLATE = re.compile(
    r"<(?=\||\uff5c|<\s*/?\s*sys\s*>>|(?:/\s*)?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn|start_of_image|"
    r"im_start|im_end|think|thinking|tool_call|tool_response|function_calls)\s*>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\])",
    re.IGNORECASE,
)
# The first character of a tag that looks like one with which the proxy encloses quoted text
# (`core.summary.prompt`). The name of the tag ends in a hyphen and hex digits, or is one that an attacker
# might guess.
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
# The beginning of a line that looks like the start of a message in a transcript, like the line above a group
# of messages (`=== RUN`), or like a heading of the proxy. Headings of the ledger and of the last request are
# found with any Markdown emphasis.
_LINE = re.compile(
    r"^(?=\[\d+\] [A-Z]+(?: \([^)\n]*\))?:|={2,}[ \t]*RUN\b|#{1,6}[ \t]+(?:session summary|previous summary|"
    r"original (?:user )?task|messages to summarize|runs to summarize|size and language)\b|"
    r"[#>*_ \t-]{0,12}(?:rules of the user|(?:open requests|decisions and preferences|told by the user|"
    r"also said by the user|observed in tool output|last request from user)\b[^\n:]{0,60}:))",
    re.IGNORECASE | re.MULTILINE,
)


def remove_invisible(text: str) -> str:
    """Returns the text without invisible characters, and with newlines as line ends."""
    return _UNSEEN.sub("", text.replace("\r\n", "\n"))


def escape_template_marks(text: str) -> str:
    """Returns the text with a space inserted into every control token of a chat template."""
    return _TEMPLATE.sub(lambda found: f"{found[0]} ", text)


def escape_frames(text: str) -> str:
    """Returns the text with a space inserted into every phrase that could begin or end a frame of the proxy.

    A frame is the text that the proxy puts around a summary or a record.
    """
    return _FRAME.sub(lambda found: f"{found[0]} ", text)


def escape_frames_and_headings(text: str) -> str:
    """Returns the text in a form that imitates no frame, heading or transcript of the proxy.

    A space is inserted into phrases that could begin or end a frame. A backslash is put before lines that
    look like a heading of the proxy or like another message of a transcript.
    """
    return _LINE.sub(r"\\", escape_frames(text))


def sanitize_text(text: str) -> str:
    """Returns the text of a message, or an earlier summary, in a form that is safe inside a fence.

    A fence is a pair of tags around quoted text. A frame is the text that the proxy puts around a summary
    or a record. The result contains no control token of a chat template, no text that looks like a fence
    or a frame, no line that looks like another message, and no invisible character. A second call does not
    change the result.
    """
    return escape_frames_and_headings(_FENCE.sub("< ", escape_template_marks(remove_invisible(text))))

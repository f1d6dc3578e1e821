"""Cleans and validates what a summary model wrote. The answer is data: it never becomes a rule."""

import re

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.sanitize import escape_template_marks, remove_invisible

MIN_CHARACTERS = 40
# Maximum characters of a refusal. A longer text that begins like a refusal is a summary that reports one.
REFUSAL_CHARACTERS = 400
# A cut text ends with a whole line or sentence if at least this share of its characters is kept.
LINE_SHARE = 0.5
# Values of `finish_reason` which mean that an answer reached its output limit or filled the context window.
_LIMIT_FINISH_REASONS = frozenset({
    "incomplete", "length", "max_output_tokens", "max_tokens", "model_context_window_exceeded",
    "model_length",
})  # fmt: skip

_OWN_HEADING = re.compile(r"\A\s*+#{1,6}[^\n]*session summary[^\n]*(?:\n+|\Z)", re.IGNORECASE)
_REASONING = r"(?:think(?:ing)?|reason(?:ing)?|thoughts?|analysis|scratchpad)"
_REASONING_START = re.compile(rf"\s*+[<\[◁](?P<name>{_REASONING})[>\]▷]", re.IGNORECASE)
_REASONING_END = re.compile(rf"^[ \t]*[<\[◁]/{_REASONING}[>\]▷][ \t]*$\n?", re.IGNORECASE | re.MULTILINE)
_RUN_MARK = re.compile(
    r"^[ \t]*+[=#*<\[][=#*<\[ \t]*+run[ \t]*+(?P<number>\d{1,4})[]=#*>:. \t]*+$",
    re.IGNORECASE | re.MULTILINE,
)
_HELP = (
    "help|assist|do (?:that|this)|summari[sz]e|comply|provide|fulfil|continue|process|share|answer|access|see"
)
_REFUSAL = re.compile(
    rf"\W*(?:(?:i'?m|i am|we'?re) (?:very |really |so )?(?:sorry|afraid|unable)|sorry\b|i apologi[sz]e|"
    rf"(?:unfortunately,? )?i (?:can't|cannot|can not|won't|am unable to|must decline to) (?:{_HELP})|"
    r"as an ai\b|(?:es )?tut mir (?:sehr )?leid|entschuldigung|leider kann ich|"
    r"ich kann (?:dabei|dir|ihnen|das) (?:\w+ )*nicht|je suis (?:vraiment )?désolé|désolée?\b|"
    r"je ne peux pas (?:vous|t'|faire|résumer|répondre|traiter)|lo siento|lo lamento|"
    r"no puedo (?:ayudar|hacer|resumir|responder|cumplir)|mi (?:dis)?spiace|"
    r"non posso (?:aiutar|far|riassumere|rispondere)|sinto muito|desculpe|lamento\b|"
    r"não posso (?:ajudar|fazer|resumir|responder)|het spijt me|ik kan (?:hier|dat|je) (?:\w+ )*niet|"
    r"przepraszam|jag kan (?:tyvärr )?inte|tyvärr|üzgünüm|извините|к сожалению|я не могу|простите|"
    r"很抱歉|抱歉|对不起|對不起|我无法|我無法|我不能|申し訳|すみません|ごめんなさい|죄송|미안|"
    r"عذرا|آسف|لا أستطيع|لا يمكنني|क्षमा|माफ़|मुझे खेद)",
    re.IGNORECASE,
)


def clean_summary(text: str) -> str:
    """Returns the text without invisible characters, marks of chat templates and a heading "Session Summary".

    The heading is removed because the proxy itself writes it above the summary.
    """
    return _OWN_HEADING.sub("", escape_template_marks(remove_invisible(text))).strip()


def is_unfinished(finish_reason: str) -> bool:
    """Returns whether a provider's `finish_reason` means that the answer was cut at a limit."""
    return finish_reason.casefold() in _LIMIT_FINISH_REASONS


def validate_summary(
    text: str, finish_reason: str, *, called_tools: bool, refused: bool, max_characters: int | None = None
) -> str:
    """Returns the cleaned text of an answer, or raises an error if the answer is no usable summary.

    Of an answer that reached its output limit, the text up to the end of the last whole line or sentence is
    used.

    Args:
        text: The answer as the model wrote it.
        finish_reason: The finish reason as the provider named it; empty if it named none.
        called_tools: Whether the answer calls a tool.
        refused: Whether the answer carries a separate refusal.
        max_characters: For a strategy that cuts summaries, the maximum characters of the summary. A longer
            answer is cut at the end of a line, a sentence or a word. None means no limit.

    Raises:
        SummaryError: With the reason `tool-calls`, `refused`, `content-filter`, `truncated`, `reasoning`,
            `empty` or `too-short`.
    """
    if called_tools:
        raise SummaryError("tool-calls")
    if refused:
        raise SummaryError("refused")
    if finish_reason == "content_filter":
        raise SummaryError("content-filter")
    unfinished = is_unfinished(finish_reason)
    try:
        return _require_usable_text(
            _cut_to_size(clean_summary(_strip_reasoning(text)), max_characters, unfinished=unfinished)
        )
    except SummaryError as error:
        if unfinished and max_characters is None and error.reason != "refused":
            raise SummaryError("truncated") from error
        raise


def _require_usable_text(text: str) -> str:
    if not text:
        raise SummaryError("empty")
    if _is_refusal(text):
        raise SummaryError("refused")
    if len(text) < MIN_CHARACTERS:
        raise SummaryError("too-short")
    return text


def _is_refusal(text: str) -> bool:
    return len(text) <= REFUSAL_CHARACTERS and _REFUSAL.match(text.replace("\u2019", "'")) is not None


def _strip_reasoning(text: str) -> str:
    """Returns the text without reasoning at its beginning.

    Raises:
        SummaryError: With the reason `reasoning` if the reasoning never ends.
    """
    start = 0
    while opening := _REASONING_START.match(text, start):
        closing = re.compile(rf"[<\[◁]/{opening['name']}[>\]▷]", re.IGNORECASE).search(text, opening.end())
        if closing is None:
            raise SummaryError("reasoning")
        start = closing.end()
    # Some chat templates write the opening tag of the reasoning themselves, so that the answer contains only
    # the closing tag.
    closings = list(_REASONING_END.finditer(text, start))
    return text[closings[-1].end() if closings else start :]


def _cut_to_size(text: str, max_characters: int | None, *, unfinished: bool) -> str:
    """Cuts a text at the end of a line or a sentence if it is too long or unfinished.

    If the text has no suitable end of a line or a sentence, it is cut at the end of a word. Without a limit,
    "" is returned instead.

    Args:
        text: The text.
        max_characters: Maximum characters of the result; None for no limit.
        unfinished: Whether the model did not finish the text, so that its last line or sentence is removed.
    """
    if not unfinished and (max_characters is None or len(text) <= max_characters):
        return text
    head = text[:max_characters]
    line = head.rfind("\n")
    if line >= len(head) * LINE_SHARE:
        return head[:line].rstrip()
    sentence = max(head.rfind(mark) for mark in (". ", "! ", "? ", "。"))
    if sentence >= len(head) * LINE_SHARE:
        return head[: sentence + 1].rstrip()
    return "" if max_characters is None else (head.rpartition(" ")[0] or head).rstrip()


def split_run_texts(answer: str, run_count: int) -> tuple[str, ...]:
    """Splits an answer about several runs into one text for each run, in order.

    A run is a group of messages that gets a text of its own. The prompt asks the model to write a mark, such
    as "=== RUN 1 ===", above each text. The answer is split at these marks.

    Args:
        answer: The answer.
        run_count: Number of runs.

    Raises:
        SummaryError: With the reason `garbage` if the texts cannot be told apart or one is missing, or
            `refused` if one of them is a refusal.
    """
    marks = list(_RUN_MARK.finditer(answer))
    if run_count == 1 and len(marks) != 1:
        return (answer.strip(),)
    if [int(mark["number"]) for mark in marks] != list(range(1, run_count + 1)):
        raise SummaryError("garbage")
    stops = [mark.start() for mark in marks[1:]] + [len(answer)]
    texts = tuple(answer[mark.end() : stop].strip() for mark, stop in zip(marks, stops, strict=True))
    if not all(texts):
        raise SummaryError("garbage")
    if any(_is_refusal(text) for text in texts):
        raise SummaryError("refused")
    return texts

"""What a summary model wrote, made usable or refused. It is data: it never becomes a rule."""

import re

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.sanitize import escape_template_marks, remove_invisible

LEAST_CHARACTERS = 40
# A refusal is short; a summary that begins by telling of one is not.
REFUSAL_CHARACTERS = 400
# A cut may give up this share of an answer for the sake of a whole line, else of a whole word.
LINE_SHARE = 0.5
# How providers say that an answer ran into its output limit or filled the window.
_UNFINISHED = frozenset({
    "incomplete", "length", "max_output_tokens", "max_tokens", "model_context_window_exceeded",
    "model_length",
})  # fmt: skip

_OWN_HEADING = re.compile(r"\A\s*+#{1,6}[^\n]*session summary[^\n]*(?:\n+|\Z)", re.IGNORECASE)
_REASONING = r"(?:think(?:ing)?|reason(?:ing)?|thoughts?|analysis|scratchpad)"
_OPENED = re.compile(rf"\s*+[<\[◁](?P<name>{_REASONING})[>\]▷]", re.IGNORECASE)
_CLOSED = re.compile(rf"^[ \t]*[<\[◁]/{_REASONING}[>\]▷][ \t]*$\n?", re.IGNORECASE | re.MULTILINE)
_RUN = re.compile(
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
    """The text without unseen characters, chat-template marks and a heading that is ours to write."""
    return _OWN_HEADING.sub("", escape_template_marks(remove_invisible(text))).strip()


def is_unfinished(finish_reason: str) -> bool:
    """Whether a provider's `finish_reason` says that the answer was cut at a limit."""
    return finish_reason.casefold() in _UNFINISHED


def validate_summary(
    text: str, finish_reason: str, *, called_tools: bool, refused: bool, cut_characters: int | None = None
) -> str:
    """The answer's text, if it is a usable summary.

    Args:
        text: As the model gave it.
        finish_reason: As the provider named it; empty if it did not.
        called_tools: Whether the answer calls a tool.
        refused: Whether it carries a refusal of its own.
        cut_characters: For a strategy that cuts: the characters that the summary may have. A longer answer
            is cut at a line's end.

    An answer that ran into its output limit is used up to the end of its last whole line, or sentence.

    Raises:
        SummaryFailed: with the reason `tool-calls`, `refused`, `content-filter`, `truncated`, `reasoning`,
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
        return _require_usable(
            _cut_to_size(clean_summary(_strip_reasoning(text)), cut_characters, unfinished=unfinished)
        )
    except SummaryError as failed:
        if unfinished and cut_characters is None and failed.reason != "refused":
            raise SummaryError("truncated") from failed
        raise


def _require_usable(text: str) -> str:
    if not text:
        raise SummaryError("empty")
    if _is_refusal(text):
        raise SummaryError("refused")
    if len(text) < LEAST_CHARACTERS:
        raise SummaryError("too-short")
    return text


def _is_refusal(text: str) -> bool:
    return len(text) <= REFUSAL_CHARACTERS and _REFUSAL.match(text.replace("\u2019", "'")) is not None


def _strip_reasoning(text: str) -> str:
    """What comes after the reasoning that stands in front, if any does."""
    at = 0
    while opened := _OPENED.match(text, at):
        closing = re.compile(rf"[<\[◁]/{opened['name']}[>\]▷]", re.IGNORECASE).search(text, opened.end())
        if closing is None:
            raise SummaryError("reasoning")
        at = closing.end()
    # some templates open the reasoning themselves, and only its end is in the answer
    closings = list(_CLOSED.finditer(text, at))
    return text[closings[-1].end() if closings else at :]


def _cut_to_size(text: str, characters: int | None, *, unfinished: bool) -> str:
    """The text up to so many characters, ending where a line does; all of it where there is no such size.

    What has neither lines nor sentences is cut at a word where there is a size; an unfinished answer is
    nothing then.
    """
    if not unfinished and (characters is None or len(text) <= characters):
        return text
    kept = text[:characters]
    line = kept.rfind("\n")
    if line >= len(kept) * LINE_SHARE:
        return kept[:line].rstrip()
    sentence = max(kept.rfind(mark) for mark in (". ", "! ", "? ", "。"))
    if sentence >= len(kept) * LINE_SHARE:
        return kept[: sentence + 1].rstrip()
    return "" if characters is None else (kept.rpartition(" ")[0] or kept).rstrip()


def split_run_texts(answer: str, count: int) -> tuple[str, ...]:
    """One text for each run, in order, from an answer that puts each behind the mark of its run.

    Raises:
        SummaryFailed: with the reason `garbage`, where the texts cannot be told apart or one is missing;
            `refused`, where one of them is a refusal.
    """
    marks = list(_RUN.finditer(answer))
    if count == 1 and len(marks) != 1:
        return (answer.strip(),)
    if [int(mark["number"]) for mark in marks] != list(range(1, count + 1)):
        raise SummaryError("garbage")
    stops = [mark.start() for mark in marks[1:]] + [len(answer)]
    found = tuple(answer[mark.end() : stop].strip() for mark, stop in zip(marks, stops, strict=True))
    if not all(found):
        raise SummaryError("garbage")
    if any(_is_refusal(text) for text in found):
        raise SummaryError("refused")
    return found

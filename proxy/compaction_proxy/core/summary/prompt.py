"""Builds the prompts of summary calls: numbered transcripts between tags, and instructions on the result.

Instructions that are the same in every call come first, so that the provider finds them in its prompt cache.
The size, the language and all text from the conversation follow them as data. The proxy treats the text
that the model writes as data, too.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat

from compaction_proxy.core.ledger.client_forms import find_user_messages
from compaction_proxy.core.message import Message
from compaction_proxy.core.sanitize import sanitize_text
from compaction_proxy.core.strategies import SummaryShape

NO_TASK = "Unknown task"
NO_EARLIER_SUMMARY = "None: this is the first compaction round."
ALIGNED_CLOSING = (
    "The conversation is everything above this message. Do not go on with it and call no tools: your answer "
    "is the text that was described, and nothing else."
)
# Number of words for each token of English prose. The prompt states the size in words, too, because models
# keep to a size in words better than to a size in tokens.
WORDS_PER_TOKEN = 0.7


CUT_MARK = "\n[...truncated...]"
# A tool result is usually cut to its beginning. If at least this many characters of it may be shown, and its
# end reports an error, its beginning and its end are shown.
TWO_ENDS_CHARACTERS = 1_000
# If the beginning and the end of a tool result are shown, the beginning gets this share of the characters.
HEAD_SHARE = 0.6
# Number of characters at the end of a tool result that are searched for an error.
ENDING_CHARACTERS = 4_000
FENCE_DIGITS = 16

_ERROR = re.compile(
    r"(?:error|exception)\b|\b(?:traceback|fatal|panic(?:ked)?|failed|failure|denied|not found|"
    r"exit(?:ed)?(?: with)?(?: code| status)? [1-9])",
    re.IGNORECASE,
)
_ROLE = re.compile(r"[^\w-]")


def _format_content(message: Message) -> str:
    lines = [message.text] if message.text else []
    lines += [f"[{part.kind}]" for part in message.parts]
    lines += [message.refusal] if message.refusal else []
    lines += [f"[Tool: {call.name}({call.arguments})]" for call in message.calls]
    return "\n".join(lines)


def _cut_text(text: str, characters: int, *, keep_end: bool) -> str:
    """Cuts a text that is longer than `characters` to this many characters, and adds `CUT_MARK`.

    Usually the beginning of the text stays. If `keep_end` is true, `characters` is at least
    `TWO_ENDS_CHARACTERS`, and the end of the text reports an error, the beginning and the end stay instead.
    """
    if len(text) <= characters:
        return text
    if not keep_end or characters < TWO_ENDS_CHARACTERS or not _ERROR.search(text[-ENDING_CHARACTERS:]):
        return text[:characters] + CUT_MARK
    head = int(characters * HEAD_SHARE)
    return f"{text[:head]}{CUT_MARK}\n{text[head - characters :]}"


def _format_entry(message: Message, shape: SummaryShape) -> str:
    result = bool(message.answered_call_ids)
    characters = shape.tool_characters if result else shape.message_characters
    return sanitize_text(_cut_text(_format_content(message), characters, keep_end=result))


def build_transcript(messages: Iterable[Message], shape: SummaryShape, first: int = 0) -> str:
    """Returns the messages as text, numbered from `first`.

    Each message is sanitised and cut to the size that the strategy allows.
    """
    return "\n\n---\n\n".join(
        f"[{index}] {_ROLE.sub('', message.role).upper()}:\n{_format_entry(message, shape)}"
        for index, message in enumerate(messages, first)
    )


def compute_fence_digest(texts: Sequence[str]) -> str:
    """Returns a digest of the texts, which becomes part of the names of the tags around them.

    It is not feasible to write a text that contains its own digest. So no text can contain the closing tag
    that the proxy puts after it.
    """
    joined = "\0".join(texts).encode("utf-8", "surrogatepass")
    return hashlib.sha256(joined).hexdigest()[:FENCE_DIGITS]


def wrap_in_fence(name: str, text: str, nonce: str) -> str:
    """Returns the text between two tags, which are on lines of their own.

    `nonce` comes from `compute_fence_digest` and becomes part of the tags' names.
    """
    return f"<{name}-{nonce}>\n{text}\n</{name}-{nonce}>"


def _format_size(max_tokens: int, language: str, run_count: int) -> str:
    words = max(10, int(max_tokens * WORDS_PER_TOKEN))
    together = f" for all {run_count} texts together" if run_count > 1 else ""
    language_name = language or "the language that the user writes in"
    return f"At most {max_tokens} tokens, which is about {words} words{together}. Write in {language_name}."


def _format_run_marks(run_count: int) -> str:
    """Returns the instruction to write one text for each run, below a line with the number of the run.

    A run is a group of messages.
    """
    marks = "\n".join(f"=== RUN {number} ===" for number in range(1, run_count + 1))
    return (
        f"There are {run_count} runs. Write one text for each, in their order, each behind a line that holds "
        f"its mark and nothing else. The marks are:\n{marks}"
    )


def build_prompt(
    groups: Sequence[Sequence[Message]],
    shape: SummaryShape,
    *,
    task: str,
    earlier_summaries: Sequence[str],
    language: str,
    max_tokens: int,
) -> str:
    """Builds the data that follow the instructions of a summary call.

    All text from the conversation is sanitised (`core.sanitize`) and put between tags. The names of the tags
    contain a digest of that text, so that no text inside can close the tags.

    Args:
        groups: The messages to summarise. If there are several groups, the model writes one text for each.
            In the prompt, a group is called a "run". `split_run_texts` splits the model's text into the texts
            of the groups.
        shape: Limits that decide how much of a message is shown.
        task: The user's task; empty if the strategy does not show the task.
        earlier_summaries: Summaries of earlier compactions, oldest first.
        language: English name of the language to write in; empty if it is unknown.
        max_tokens: Size of the summary that the prompt asks for, in tokens.
    """
    # Messages are numbered across all groups, so that no two messages have the same number.
    starts = accumulate(map(len, groups), initial=0)
    transcripts = [build_transcript(*each) for each in zip(groups, repeat(shape), starts)] or [""]
    earlier_texts, task_text = [sanitize_text(each) for each in earlier_summaries], sanitize_text(task)
    mark = compute_fence_digest([*transcripts, *earlier_texts, task_text])
    summaries = [wrap_in_fence("summary", each, mark) for each in earlier_texts] or [NO_EARLIER_SUMMARY]
    parts = [f"## Size and Language\n{_format_size(max_tokens, language, len(groups))}"]
    parts.append("\n".join(["## Previous Summary", *summaries]))
    if task_text:
        parts.append(f"## Original User Task\n{wrap_in_fence('task', task_text, mark)}")
    if len(transcripts) == 1:
        parts.append(f"## Messages to Summarize\n{wrap_in_fence('transcript', transcripts[0], mark)}")
    else:
        parts.append(f"## Runs to Summarize\n{_format_run_marks(len(transcripts))}")
        parts += [wrap_in_fence(f"run-{number}", each, mark) for number, each in enumerate(transcripts, 1)]
    return "\n\n".join(parts)


def build_aligned_prompt(instructions: str, *, language: str, max_tokens: int, run_count: int) -> str:
    """Builds the last user message of an aligned call, which asks for a summary of all messages before it.

    Args:
        instructions: The strategy's instructions. They come first, so that they are the same in every call.
        language: English name of the language to write in; empty if it is unknown.
        max_tokens: Size of the summary that the prompt asks for, in tokens.
        run_count: Number of texts to write. Each text is about one run, which is an unbroken sequence of
            assistant messages and tool results. The texts are about the `run_count` earliest runs.
    """
    parts = [
        instructions.strip(),
        f"## Size and Language\n{_format_size(max_tokens, language, run_count)}",
        ALIGNED_CLOSING,
    ]
    if run_count > 1:
        which = (
            f"A run is an unbroken row of assistant messages and tool results; take the {run_count} earliest."
        )
        parts.insert(2, f"## Runs to Summarize\n{which} {_format_run_marks(run_count)}")
    return "\n\n".join(parts)


def find_task_message(messages: Iterable[Message]) -> Message | None:
    """Returns the message that is the task, the first that the user wrote; None if there is none."""
    all_messages = tuple(messages)
    return next((all_messages[index] for index in find_user_messages(all_messages)), None)

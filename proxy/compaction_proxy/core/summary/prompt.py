"""Builds the prompts of summary calls, and exports the functions that check the answers.

Instructions come first and are the same in every call, so that the provider finds them in its prompt cache.
The size, the language and all text from the conversation follow them as data. The model's answer is data,
too.
"""

from collections.abc import Iterable, Iterator, Sequence

from compaction_proxy.core.ledger.client_forms import find_user_messages
from compaction_proxy.core.message import Message
from compaction_proxy.core.sanitize import sanitize_text
from compaction_proxy.core.strategies import SummaryShape
from compaction_proxy.core.summary.answer import (
    clean_summary,
    is_unfinished,
    split_run_texts,
    validate_summary,
)
from compaction_proxy.core.summary.transcript import (
    CUT_MARK,
    build_transcript,
    compute_fence_digest,
    wrap_in_fence,
)

__all__ = [
    "CUT_MARK",
    "NO_TASK",
    "build_aligned_prompt",
    "build_prompt",
    "build_transcript",
    "clean_summary",
    "find_task_message",
    "is_unfinished",
    "split_run_texts",
    "validate_summary",
]

NO_TASK = "Unknown task"
NO_EARLIER_SUMMARY = "None: this is the first compaction round."
ALIGNED_CLOSING = (
    "The conversation is everything above this message. Do not go on with it and call no tools: your answer "
    "is the text that was described, and nothing else."
)
# Number of words for each token of English prose. The prompt also states the size in words, because models
# keep to it better than to a size in tokens.
WORDS_PER_TOKEN = 0.7


def _format_size(max_tokens: int, language: str, run_count: int) -> str:
    words = max(10, int(max_tokens * WORDS_PER_TOKEN))
    together = f" for all {run_count} texts together" if run_count > 1 else ""
    language_name = language or "the language that the user writes in"
    return f"At most {max_tokens} tokens, which is about {words} words{together}. Write in {language_name}."


def _format_run_marks(run_count: int) -> str:
    """Returns instructions to write one text for each of several runs, each below a line with its mark."""
    marks = "\n".join(f"=== RUN {number} ===" for number in range(1, run_count + 1))
    return (
        f"There are {run_count} runs. Write one text for each, in their order, each behind a line that holds "
        f"its mark and nothing else. The marks are:\n{marks}"
    )


def _iter_transcripts(groups: Sequence[Sequence[Message]], shape: SummaryShape) -> Iterator[str]:
    """Yields a transcript of each group. The messages are numbered across all groups."""
    first = 0
    for group in groups:
        yield build_transcript(group, shape, first)
        first += len(group)


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

    All text from the conversation is sanitised (`core.sanitize`) and put between tags. The tag names contain
    a digest of that text, so that nothing inside can close the tags.

    Args:
        groups: The messages to summarise. If there are several groups, the model writes one text for each.
            The prompt calls the groups runs, and `split_run_texts` splits the answer.
        shape: Limits that decide how much of a message is shown.
        task: The user's task; empty if the strategy does not show it.
        earlier_summaries: Summaries of earlier compactions, oldest first.
        language: English name of the language to write in; empty if it is unknown.
        max_tokens: Size that the prompt asks for.
    """
    transcripts = list(_iter_transcripts(groups, shape)) or [""]
    earlier_texts, task_text = [sanitize_text(each) for each in earlier_summaries], sanitize_text(task)
    mark = compute_fence_digest([*transcripts, *earlier_texts, task_text])
    summaries = [wrap_in_fence("summary", each, mark) for each in earlier_texts] or [NO_EARLIER_SUMMARY]
    parts = [f"## Size and Language\n{_format_size(max_tokens, language, len(groups))}"]
    parts.append("\n".join(["## Previous Summary", *summaries]))
    parts += [f"## Original User Task\n{wrap_in_fence('task', task_text, mark)}"] if task_text else []
    return "\n\n".join([*parts, *_format_material(transcripts, mark)])


def _format_material(transcripts: Sequence[str], mark: str) -> list[str]:
    """Returns each transcript between tags. If there are several, instructions on their marks come first."""
    if len(transcripts) == 1:
        return [f"## Messages to Summarize\n{wrap_in_fence('transcript', transcripts[0], mark)}"]
    runs = [wrap_in_fence(f"run-{number}", each, mark) for number, each in enumerate(transcripts, 1)]
    return [f"## Runs to Summarize\n{_format_run_marks(len(transcripts))}", *runs]


def build_aligned_prompt(instructions: str, *, language: str, max_tokens: int, run_count: int) -> str:
    """Builds the last user message of an aligned call, which asks for a summary of all messages above it.

    Args:
        instructions: The strategy's instructions. They come first, so that they are the same in every call.
        language: English name of the language to write in; empty if it is unknown.
        max_tokens: Size that the prompt asks for.
        run_count: Number of texts to write. Each is about one unbroken row of assistant messages and tool
            results (a run), from the earliest run on.
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
    """Returns the task, which is the first message that the user wrote, or None if there is none."""
    all_messages = tuple(messages)
    return next((all_messages[index] for index in find_user_messages(all_messages)), None)

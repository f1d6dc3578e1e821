"""The ledger: rules, wishes and facts lifted word for word from a conversation; no summary can lose them.

Only what users say themselves becomes an entry. What tools and the assistant say is observed: short values,
kept apart. What was said later of the same subject takes the place of what was said before.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice

from compaction_proxy.core.ledger.actions import describe_actions, describe_briefly
from compaction_proxy.core.ledger.active import Outdated, Spoken, Standing
from compaction_proxy.core.ledger.cues import Kind
from compaction_proxy.core.ledger.facts import Observed, Shown, observed, shown
from compaction_proxy.core.ledger.frontier import Frontier, RequestState, read_frontier
from compaction_proxy.core.ledger.ledger_text import Entry, Ledger, Progress, Remark, flat, rendered
from compaction_proxy.core.message import Message

__all__ = [
    "Entry",
    "Kind",
    "Ledger",
    "Observed",
    "Outdated",
    "Progress",
    "Remark",
    "Standing",
    "has_every_rule",
    "ledger",
    "outdated",
    "rendered",
    "rules",
]

# The beginning of a long message that is quoted with the remaining words of the user, in characters.
HEAD_CHARACTERS = 600
PIN = -1
# Rules that one ledger quotes. Of 217 recorded conversations of coding agents, desks and chats none has more
# than 54. Every quoted rule is sent with every later request, so the number must end somewhere.
MAX_RULES = 500
# Lines of what was done, and of what was run, that one ledger may hold.
MAX_ACTIONS = 200


def ledger(
    messages: Sequence[Message],
    covered: Collection[int],
    name: Callable[[int], str],
    pins: Sequence[str] = (),
    *,
    standing: Standing | None = None,
    frontier: Frontier | None = None,
    seen: Callable[[Message], tuple[Shown, ...]] = shown,
) -> Ledger:
    """What has to be kept of the covered messages.

    Args:
        messages: All non-privileged messages of the request; an index is a position among them.
        covered: Indices that the forwarded list will not contain any more. Only they are quoted, but what
            is said in any message replaces what was said before.
        name: The id of the message at an index.
        pins: Rules given by header or API; they come first. Of pins and rules together the ledger quotes at
            most `MAX_RULES`.
        standing: Of these messages, where it is known already.
        frontier: Where the conversation stands, where it is known already.
        seen: What a message shows; `core.ledger.facts.shown`, or a memory of it.
    """
    gone = frozenset(covered)
    come = read_frontier(messages) if frontier is None else frontier
    kept = (standing or Standing(messages)).of(gone)
    pinned = tuple(Entry(Kind.RULE, pin.strip(), "", PIN) for pin in dict.fromkeys(pins) if pin.strip())
    entries, rest = [], []
    for at, spoken in kept:
        if (kind := _kind(spoken, come)) is not None:
            entries.append(Entry(kind, spoken.said.text, name(at), at, bool(spoken.said.label)))
        elif not (spoken.is_withdrawn or _find_outcome(spoken, come)):
            rest.append((at, spoken))
    progress = (*_list_progress(come, gone), *_list_answered(kept, come), *_list_runs(come, gone))
    bounded = tuple(_bound_rules([*pinned, *entries]))
    return Ledger(bounded, tuple(_remarks(rest, name)), observed(messages, gone, seen), progress)


def _kind(spoken: Spoken, frontier: Frontier) -> Kind | None:
    """What a statement is to be gone by as; None for nothing: a request is one only while it is open."""
    state = frontier.states.get((spoken.turn, spoken.said.text))
    if spoken.kind not in {Kind.REQUEST, None} or state is None:
        return spoken.kind
    return Kind.REQUEST if state is RequestState.OPEN and not spoken.is_closed else None


def _find_outcome(spoken: Spoken, frontier: Frontier) -> str:
    """What came of an answered request or question; "" for what is none, or where that is not known."""
    key = spoken.turn, spoken.said.text
    asks = spoken.kind is Kind.REQUEST or (spoken.kind is None and spoken.said.question)
    return (
        frontier.outcomes.get(key, "") if asks and frontier.states.get(key) is RequestState.ANSWERED else ""
    )


def _list_progress(frontier: Frontier, gone: Collection[int]) -> Iterator[Progress]:
    """What is left open, what was changed, and where it stopped; each kind newest first."""
    left = [each for each in frontier.loose_ends if each.at in gone]
    yield from (Progress(each.kind, each.text, each.at) for each in reversed(left))
    actions = [each for each in frontier.actions if each[0] in gone and each[1].is_write]
    for line in islice(describe_actions(actions), MAX_ACTIONS):
        yield Progress("tried" if line.has_failed else "done", line.text, line.at, line.short)
    if (step := frontier.find_last_step(gone)) is not None:
        yield Progress("last step", step.describe(), step.at, describe_briefly(step.action))


def _list_answered(kept: Sequence[tuple[int, Spoken]], frontier: Frontier) -> Iterator[Progress]:
    """What came of answered requests, newest first; those of which the same came share a line."""
    said: dict[str, dict[str, int]] = {}
    for at, spoken in kept:
        if outcome := _find_outcome(spoken, frontier):
            said.setdefault(outcome, {})[spoken.said.text] = at
    for outcome, texts in sorted(said.items(), key=lambda item: -max(item[1].values())):
        yield Progress("answered", f"{' '.join(texts)} → {outcome}", max(texts.values()))


def _list_runs(frontier: Frontier, gone: Collection[int]) -> Iterator[Progress]:
    """Other calls than reads, such as tests, newest first."""
    actions = [
        (at, each)
        for at, each in frontier.actions
        if at in gone and not each.is_write and (each.has_failed or not each.is_read)
    ]
    for line in islice(describe_actions(actions), MAX_ACTIONS):
        yield Progress("ran", line.text, line.at, line.short)


def _bound_rules(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yields the entries in their order, at most `MAX_RULES` rules among them.

    Pins win over rules that the user labelled, these over other rules, and the newest over older ones.
    """
    numbers = [number for number, entry in enumerate(entries) if entry.kind is Kind.RULE]
    numbers.sort(key=lambda number: (entries[number].at == PIN, entries[number].labelled, number))
    left_out = frozenset(numbers[:-MAX_RULES])
    yield from (entry for number, entry in enumerate(entries) if number not in left_out)


def _remarks(kept: Sequence[tuple[int, Spoken]], name: Callable[[int], str]) -> Iterator[Remark]:
    """What is no entry, message by message."""
    rest: dict[int, list[str]] = {}
    for at, spoken in kept:
        if not spoken.kind:
            rest.setdefault(at, []).append(spoken.said.text)
    for at, said in rest.items():
        yield Remark(" ".join(said)[:HEAD_CHARACTERS], name(at), at)


def outdated(messages: Sequence[Message]) -> Outdated:
    """What later messages have replaced, so that no summary brings it back."""
    return Standing(messages).outdated


def rules(ledger: Ledger) -> tuple[str, ...]:
    """The texts of rules and pins as they are rendered, in one line; each has to be in what is forwarded."""
    return tuple(flat(entry.text) for entry in ledger.entries if entry.kind is Kind.RULE)


def has_every_rule(text: str, rules: Sequence[str]) -> bool:
    """Returns whether every rule stands in the text, word for word.

    Each search starts where the last one ended, so the time is linear in a text that quotes the rules in
    their order, as a rendered ledger does. A rule that stands elsewhere costs one search of the whole text.
    """
    start = 0
    for rule in rules:
        found = text.find(rule, start)
        if found < 0 and rule not in text:
            return False
        start = max(start, found)
    return True

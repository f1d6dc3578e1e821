"""Determines the frontier of a conversation: which requests are answered, their outcomes, and the open work.

The messages that follow a request decide its state, not the words of the request. A request counts as
answered if the assistant has replied without asking a question or failing, and the user's next message
reports no failure. If the later messages do not show whether a request was answered, its state is unknown. A
request with an unknown state is not listed as open.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from compaction_proxy.core.ledger.actions import (
    Action,
    ProgressNote,
    describe_action,
    describe_argument,
    read_action,
)
from compaction_proxy.core.ledger.client_forms import find_user_messages
from compaction_proxy.core.ledger.cues import StatementKind, has_cue
from compaction_proxy.core.ledger.edits import find_edit_blocks
from compaction_proxy.core.ledger.facts import take_head_and_tail, to_one_line
from compaction_proxy.core.ledger.statements import (
    Statement,
    collect_subject_words,
    fold_text,
    read_statements,
    reads_as_order,
)
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.sanitize import remove_invisible, sanitize_text

# Maximum number of unanswered requests that are tracked at the same time. The state of older ones becomes
# unknown. The limit keeps the time linear in the number of requests.
MAX_WAITING = 64
# Number of characters that are read at each end of a reply, and number of last sentences that are searched
# for questions and promises.
REPLY_CHARACTERS, LAST_SENTENCES = 2_000, 4
# Maximum characters of a message in which the user only thanks the assistant, and of one in which the user
# only approves a proposal.
THANKS_CHARACTERS, APPROVAL_CHARACTERS = 300, 60
# A reply that asks a question may also answer a request. It is assumed to do so if it has at least this many
# characters besides its question.
SUBSTANCE_CHARACTERS = 240
# Characters quoted of an outcome, a question or a promise.
QUOTED_CHARACTERS = 160
# Number of turns after which a failure or a promise is forgotten, and after which the state of an unanswered
# request becomes unknown.
LOOSE_END_TURNS, WAITING_TURNS = 4, 12
# A statement counts as program output if it occurs in `PRINTED_TIMES` user messages, each of at least
# `PRINTED_STATEMENTS` statements.
PRINTED_TIMES, PRINTED_STATEMENTS = 3, 4
# A failure report counts as being about an answered request if both have at least `SHARED_WORDS` words in
# common, and at least `SHARED_SHARE` of the words of the shorter one.
SHARED_WORDS, SHARED_SHARE = 2, 0.25
# A failure report with more words than this counts as pasted text, which has words in common with many
# requests. So it is compared only with requests of the last `LOOSE_END_TURNS` turns.
PASTED_WORDS = 80
# Tools with which a model only writes down its thoughts. Calls of these tools are ignored.
THINKING_TOOLS = frozenset({"think", "sequentialthinking", "sequential_thinking"})
# A reply that ends without a full stop still counts as complete if its last line has fewer words than this.
MIN_BROKEN_WORDS = 8
# Minimum characters of a sentence that can state the outcome of a request.
MIN_RESULT_CHARACTERS = 12
# The key of the assistant's last promise in `_FrontierReader.loose_ends`. Keys of failed calls are never
# empty.
_PROMISE_KEY = ""

_SENTENCE = re.compile(r"(?<=[.!?:])[\"')*_]*\s+|(?<=[。！？])\s*|\n+")  # noqa: RUF001 - stops of other scripts
_STOP = re.compile(r"[.!?:][\"')*_]?\s")
_ITEM = re.compile(r"[ \t]*(?:[-*+•#|>`]|\d{1,3}[.)])")
_FENCE = re.compile(r"^[ \t]*```.*?(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_QUESTION_END = re.compile(r"[?？؟][\"')*_ ]*\Z")  # noqa: RUF001
# A sign that a text is code and not prose.
_CODE = re.compile(r"\w\(\)|[{};=]|\w\.\w+\(|^\S+\Z")
# A user message that is only a command to the client, such as "/clear", or git's report of a commit. Such a
# message makes no request.
_CLIENT_COMMAND = re.compile(r"/\S*\Z|commit [0-9a-f]{7,40} \w+(?:\([^)]{0,40}\))?!?:")
_MARKUP = re.compile(r"^[ \t]*[#>]+[ \t]|[*`]+", re.MULTILINE)
# Underscores that mark a word as emphasised, but not those of names such as `__init__` and `step_`.
_EMPHASIS = re.compile(r"(?<!\w)_([^\s_][^_\n]*)_(?!\w)")


class StatementStatus(StrEnum):
    """The state of a user statement.

    `OPEN`, `ANSWERED` and `UNKNOWN` are states of requests. A statement that asks for nothing is `TOLD`.
    """

    OPEN = "open"
    ANSWERED = "answered"
    UNKNOWN = "unknown"
    TOLD = "told"


@dataclass(frozen=True, slots=True)
class ReplyReading:
    """What a reply of the assistant says about the state of the work.

    Attributes:
        has_question: Whether the reply asks the user a question. An offer of help is no question.
        question: The last question; "" if there is none or it must not be quoted.
        promise: The last sentence in which the assistant says what it is going to do; "" if there is none or
            it must not be quoted.
        outcome: The first sentence that states an outcome of the request; "" if there is none.
        last_sentence: The last sentence; "" if it must not be quoted.
        question_words: The stems of the words in the questions, and the exact values, such as ids, in them.
        reply_words: The stems of the words and the exact values in the whole reply, if it asks a question and
            `has_substance` is true. Otherwise the same as `question_words`.
        has_substance: Whether the reply says enough besides its questions to have answered a request.
        edits: The edits of files in the reply, each as a call of a tool `edit`.
    """

    has_question: bool = False
    question: str = ""
    promise: str = ""
    outcome: str = ""
    last_sentence: str = ""
    question_words: frozenset[str] = frozenset()
    reply_words: frozenset[str] = frozenset()
    has_substance: bool = False
    edits: tuple[MessageToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Frontier:
    """The state of the work after the last message of a conversation.

    Attributes:
        states: The state of each user statement, by the number of its user message (from 0) and its text.
            Statements to which the user gave a label, such as "TODO:", are not included.
        outcomes: The outcomes of answered requests, by the same keys as `states`, each on one line without
            hidden characters. Requests with an unknown outcome are not included.
        loose_ends: Open work other than requests of the user, oldest first. `failed`: a call failed. `asked
            back`: the assistant asked a question. `to do`: the assistant said what it was going to do.
        actions: All calls except those of `THINKING_TOOLS`, each with the index of its message.
        intents: The last sentence of each assistant message that makes a call, by the index of the message.
    """

    states: Mapping[tuple[int, str], StatementStatus] = field(default_factory=dict)
    outcomes: Mapping[tuple[int, str], str] = field(default_factory=dict)
    loose_ends: tuple[ProgressNote, ...] = ()
    actions: tuple[tuple[int, Action], ...] = ()
    intents: Mapping[int, str] = field(default_factory=dict)

    def find_last_step(self, covered: Collection[int]) -> ProgressNote | None:
        """Returns a note on the last call in the messages at the indices `covered`; None without a call.

        The text of the note begins with the last sentence of the assistant's message that makes the call.
        """
        for at, action in reversed(self.actions):
            if at in covered:
                intent, call = self.intents.get(at, "").rstrip(" .:。"), describe_action(action)
                return ProgressNote("last step", f"{intent}: {call}" if intent else call, at, call)
        return None


ActionReader = Callable[[MessageToolCall, str | None], Action]


def _split_sentences(text: str) -> list[str]:
    """Returns the sentences of a reply. Code blocks are left out."""
    prose = _FENCE.sub("\n", text)
    return [each for piece in _SENTENCE.split(prose) if (each := _strip_markup(piece))]


def _strip_markup(text: str) -> str:
    """Returns a text on one line, without the markup of headings, quotations, emphasis and code."""
    return " ".join(_EMPHASIS.sub(r"\1", _MARKUP.sub("", text)).split())


def quote_sentence(text: str) -> str:
    """Returns a sentence on one line, in a form that is safe to quote, or "" if it is worded as an order."""
    line = _strip_markup(remove_invisible(text[: 4 * QUOTED_CHARACTERS]))
    return "" if not line or reads_as_order(line) else sanitize_text(to_one_line(line, QUOTED_CHARACTERS))


def read_reply(text: str) -> ReplyReading:
    """Returns what a reply says about the state of the work."""
    if len(text) <= 2 * REPLY_CHARACTERS:
        pieces = _split_sentences(text)
    else:
        # Only both ends of a long reply are read. The sentences at the two cuts are incomplete, so they are
        # dropped.
        pieces = _split_sentences(text[:REPLY_CHARACTERS])[:-1]
        pieces += _split_sentences(text[-REPLY_CHARACTERS:])[1:]
    last = pieces[-LAST_SENTENCES:]
    asking = [each for each in last if _is_asking(each)]
    promises = [each for each in last if each not in asking and _is_promise(each)]
    sentences = [
        each
        for each in pieces
        if each not in asking and len(each) >= MIN_RESULT_CHARACTERS and not is_pleasantry(each)
    ]
    facts = (
        each for each in sentences if not (_is_promise(each) or each.endswith(":") or _CODE.search(each))
    )
    question_words = collect_subject_words(read_statements("\n".join(asking)))
    has_substance = sum(map(len, sentences)) >= SUBSTANCE_CHARACTERS
    return ReplyReading(
        has_question=bool(asking),
        question=quote_sentence(asking[-1] if asking else ""),
        promise=quote_sentence(promises[-1] if promises else ""),
        outcome=next((line for each in facts if (line := quote_sentence(each))), ""),
        last_sentence=quote_sentence(pieces[-1] if pieces else ""),
        question_words=question_words,
        reply_words=collect_subject_words(read_statements("\n".join(pieces)))
        if asking and has_substance
        else question_words,
        has_substance=has_substance,
        edits=tuple(
            MessageToolCall(
                "", "edit", json.dumps({"path": path, "old": old, "new": new}, ensure_ascii=False)
            )
            for path, old, new in find_edit_blocks(text)
        ),
    )


def _is_asking(sentence: str) -> bool:
    plain = fold_text(sentence)
    asks = _QUESTION_END.search(sentence) is not None or has_cue(plain, "asking_back")
    return asks and not has_cue(plain, "offer")


def _is_promise(sentence: str) -> bool:
    plain = fold_text(sentence)
    return has_cue(plain, "promise") and not has_cue(plain, "offer")


def is_pleasantry(sentence: str) -> bool:
    """Returns whether a sentence contains a cue for thanks or for an offer of help."""
    plain = fold_text(sentence)
    return has_cue(plain, "offer") or has_cue(plain, "thanks")


def is_thanks(text: str, statements: Sequence[Statement]) -> bool:
    """Returns whether a user's message only thanks, agrees or says goodbye, and asks for nothing."""
    short = len(text) <= THANKS_CHARACTERS and has_cue(fold_text(text), "thanks")
    asks = (each for each in statements if each.is_question or each.kind is StatementKind.REQUEST)
    return short and all(is_pleasantry(each.text) for each in asks)


def _is_request(statement: Statement, statements: Sequence[Statement], *, answers: bool) -> bool:
    """Returns whether a statement asks the assistant for something.

    The kind of a statement decides. A statement of no kind is a request if it is a question or a wish, or if
    `answers` is false and its message contains no other request. Labelled statements, thanks and commands to
    the client are no requests.

    Args:
        statement: The statement.
        statements: All statements of the same message.
        answers: Whether the message answers a question of the assistant or only thanks the assistant.
    """
    if statement.label or is_pleasantry(statement.text) or _CLIENT_COMMAND.match(statement.folded_text):
        return False
    if statement.kind is not None:
        return statement.kind is StatementKind.REQUEST
    if statement.is_question or has_cue(statement.folded_text, "wish"):
        return True
    return not answers and not any(other.kind is StatementKind.REQUEST for other in statements)


def _shares_enough_words(words: frozenset[str], request_words: frozenset[str]) -> bool:
    shared = len(words & request_words)
    return shared >= max(SHARED_WORDS, SHARED_SHARE * min(len(words), len(request_words)))


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    """A request that is not answered yet.

    Attributes:
        turn: Number of its user message.
        statement: The request.
        words: The stems of the words and the exact values of the request. If the request has too few of
            them, the stems and exact values of its whole message.
    """

    turn: int
    statement: Statement
    words: frozenset[str]

    @property
    def key(self) -> tuple[int, str]:
        return self.turn, self.statement.text


@dataclass(slots=True)
class _TurnWork:
    """The assistant's work between a user's message and the next one.

    Attributes:
        turn: Number of the user message before this work; -1 for work before the first user message.
        actions: The calls, each with the index of its message.
        reply: The assistant's final reply; None if the assistant did not finish its work.
        reply_index: Index of the final reply.
    """

    turn: int
    actions: list[tuple[int, Action]] = field(default_factory=list)
    reply: ReplyReading | None = None
    reply_index: int = 0

    @property
    def has_written(self) -> bool:
        """Whether a call is known to have changed something."""
        return any(
            action.is_write and not action.has_failed and action.has_result for _, action in self.actions
        )


class _FrontierReader:
    """Reads the turns of a conversation in order and keeps track of the states of its requests."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, str], StatementStatus] = {}
        self.outcomes: dict[tuple[int, str], str] = {}
        self.waiting_requests: list[_OpenRequest] = []
        self.answered_requests: list[_OpenRequest] = []
        self.text_counts: Counter[str] = Counter()
        # Notes on failed calls and on the last promise, by key, each with the turn of its message.
        self.loose_ends: dict[str, tuple[int, ProgressNote]] = {}
        self.work = _TurnWork(-1)
        self.writes: list[Action] = []

    def read_user(self, text: str, statements: Sequence[Statement]) -> None:
        """Reads a user message: updates the states of earlier requests, and adds the new requests."""
        turn, about = self.work.turn + 1, collect_subject_words(statements)
        ends = take_head_and_tail(text, REPLY_CHARACTERS, REPLY_CHARACTERS)
        reports_failure = has_cue(fold_text(ends), "failure_report")
        failed = self._find_reported_requests(turn, about) if reports_failure else []
        is_elsewhere = bool(failed) and not any(
            _shares_enough_words(about, each.words) for each in self.waiting_requests
        )
        thanks = is_thanks(text, statements)
        if thanks:
            self._mark_answered(self.waiting_requests)
            self.loose_ends.clear()
        elif self.work.reply is not None and (not reports_failure or is_elsewhere):
            self._settle_requests(text, statements, self.work.reply)
        for request in failed:
            self.states.pop(request.key, None)
            self.outcomes.pop(request.key, None)
        self.answered_requests = [each for each in self.answered_requests if each not in failed]
        self.waiting_requests = sorted([*self.waiting_requests, *failed], key=lambda each: each.turn)
        answers = thanks or (self.work.reply is not None and self.work.reply.has_question)
        printed = self._find_printed_texts(statements)
        is_asked = [
            each.text not in printed and _is_request(each, statements, answers=answers) for each in statements
        ]
        for each, asked, next_asked in zip(statements, is_asked, [*is_asked, False][1:], strict=True):
            # A statement directly before a request may explain the request. So it counts as a request, too.
            explains = each.kind is None and not each.label and len(each.words) > SHARED_WORDS
            if asked or (next_asked and explains):
                own = collect_subject_words([each])
                self.waiting_requests.append(
                    _OpenRequest(turn, each, own if len(own) > SHARED_WORDS else about)
                )
            elif not each.label:
                self.states[turn, each.text] = StatementStatus.TOLD
        self._mark_unknown(self.waiting_requests[:-MAX_WAITING])
        self._mark_unknown([each for each in self.waiting_requests if turn - each.turn > WAITING_TURNS])

    def read_work(self, work: _TurnWork) -> None:
        """Reads the assistant's work after a user message, and updates the open work."""
        self.work = work
        for at, action in work.actions:
            key = _build_failure_key(action)
            if action.has_failed:
                shown = (text for _, text in action.arguments[:2])
                text = " ".join([action.tool, *shown, "→", action.outcome])
                self.loose_ends[key] = work.turn, ProgressNote("failed", text, at)
            elif action.has_result:
                self.loose_ends.pop(key, None)
            if action.is_write and action.has_result and not action.has_failed:
                self.writes.append(action)
        promise = work.reply.promise if work.reply is not None else ""
        if promise or work.actions:
            self.loose_ends.pop(_PROMISE_KEY, None)
        if promise:
            self.loose_ends[_PROMISE_KEY] = work.turn, ProgressNote("to do", promise, work.reply_index)
        self.loose_ends = {
            key: (turn, end)
            for key, (turn, end) in self.loose_ends.items()
            if work.turn - turn < LOOSE_END_TURNS
        }

    def _settle_requests(self, text: str, statements: Sequence[Statement], reply: ReplyReading) -> None:
        """Marks waiting requests as answered or unknown, given the last reply and the user's next message.

        - If the reply asks a question and a call has changed something, the requests that have no word in
          common with the question are answered. The others keep waiting.
        - If the reply asks a question and no call has changed anything, the requests keep waiting. But if the
          reply says enough besides its question (`has_substance`), no call has failed, and the user requests
          something else, their state becomes unknown.
        - If the reply asks nothing and a call has changed something, the requests are answered.
        - If the reply asks nothing and a call of the last turn failed, the requests keep waiting. But if the
          user asks for something, the state of requests from earlier turns becomes unknown.
        - In all other cases the requests are answered, unless the user only approves a proposal.

        Args:
            text: The new user message.
            statements: The statements of this message.
            reply: The assistant's reply just before this message.
        """
        waiting = self.waiting_requests
        failed_turns = {turn for key, (turn, _) in self.loose_ends.items() if key != _PROMISE_KEY}
        requests_more = any(each.kind is StatementKind.REQUEST for each in statements)
        if reply.has_question and self.work.has_written:
            self._mark_answered([each for each in waiting if not each.statement.words & reply.question_words])
        elif reply.has_question:
            goes_on = requests_more and not collect_subject_words(statements) & reply.reply_words
            if reply.has_substance and goes_on and not failed_turns:
                self._mark_unknown(waiting)
        elif self.work.has_written:
            self._mark_answered(waiting)
        elif self.work.turn in failed_turns:
            if requests_more or any(each.is_question for each in statements):
                self._mark_unknown([each for each in waiting if each.turn < self.work.turn])
        elif len(text) > APPROVAL_CHARACTERS or not has_cue(fold_text(text), "approval"):
            self._mark_answered(waiting)

    def _mark_answered(self, requests: Sequence[_OpenRequest]) -> None:
        """Marks requests as answered by the last reply.

        Their outcome names the last successful calls that changed something, at most three. Without such
        calls, the outcome is the sentence in which the reply states a result.
        """
        tools = dict.fromkeys(
            " ".join([action.tool, *(describe_argument(*each) for each in action.arguments[:1])])
            for action in self.writes[-3:]
        )
        outcome = self.work.reply.outcome if self.work.reply is not None else ""
        if tools:
            outcome = to_one_line("done: " + ", ".join(tools), QUOTED_CHARACTERS)
        for each in requests:
            self.states[each.key] = StatementStatus.ANSWERED
            if outcome:
                self.outcomes[each.key] = outcome
        self.answered_requests = [*self.answered_requests, *requests][-MAX_WAITING:]
        self._drop_requests(requests)
        self.writes.clear()

    def _mark_unknown(self, requests: Sequence[_OpenRequest]) -> None:
        self.states.update((each.key, StatementStatus.UNKNOWN) for each in requests)
        self._drop_requests(requests)

    def _drop_requests(self, requests: Sequence[_OpenRequest]) -> None:
        keys = {each.key for each in requests}
        self.waiting_requests = [each for each in self.waiting_requests if each.key not in keys]

    def _find_printed_texts(self, statements: Sequence[Statement]) -> frozenset[str]:
        """Returns the texts of statements that count as program output.

        A statement counts as program output if at least `PRINTED_TIMES` messages contain it, each of which
        has at least `PRINTED_STATEMENTS` statements.
        """
        if len(statements) < PRINTED_STATEMENTS:
            return frozenset()
        texts = frozenset(each.text for each in statements)
        self.text_counts.update(texts)
        return frozenset(text for text in texts if self.text_counts[text] >= PRINTED_TIMES)

    def _find_reported_requests(self, turn: int, words: frozenset[str]) -> list[_OpenRequest]:
        """Returns the answered requests of recent turns that a failure report may be about.

        `turn` is the turn of the report, and `words` are its words. If a report has more than
        `PASTED_WORDS` words, fewer turns count as recent.
        """
        turns = LOOSE_END_TURNS if len(words) > PASTED_WORDS else WAITING_TURNS
        recent = (each for each in self.answered_requests if turn - each.turn < turns)
        return [each for each in recent if _shares_enough_words(words, each.words)]

    def list_loose_ends(self) -> list[ProgressNote]:
        """Returns the open work other than requests of the user, oldest first."""
        ends = [end for _, end in self.loose_ends.values()]
        if self.work.reply is not None and self.work.reply.question:
            ends.append(ProgressNote("asked back", self.work.reply.question, self.work.reply_index))
        return sorted(ends, key=lambda each: each.message_index)


def _build_failure_key(action: Action) -> str:
    """Builds a key that is the same for a failed call and for a later call that repeats it.

    The key consists of the tool and the first argument value, or the first two words of a shell command. Once
    a call with the same key succeeds, the failure no longer counts.
    """
    name, value = action.arguments[0] if action.arguments else ("", "")
    return f"{action.tool} {value if name else ' '.join(value.split()[:2])}"


def _is_cut_off(text: str) -> bool:
    """Returns whether a reply breaks off in the middle of a sentence or of inline code.

    A reply without any finished sentence counts as complete unless it breaks off in inline code.
    """
    text = text[-REPLY_CHARACTERS:].rstrip()
    last = text.rpartition("\n")[2]
    if not text or not text[-1].islower() or _ITEM.match(last) or len(last.split()) < MIN_BROKEN_WORDS:
        return False
    return _STOP.search(text) is not None or last.count("`") % 2 == 1


def _iter_edits_with_results(
    reply: ReplyReading, messages: Sequence[Message], index: int
) -> Iterator[tuple[MessageToolCall, str | None]]:
    """Yields the edits in the reply at `index`, each with its result; None if no message follows the reply.

    The client reports in the next message which SEARCH blocks match no lines of their file. An edit without
    such a report is done.
    """
    if not reply.edits:
        return
    report = take_head_and_tail(messages[index + 1].text) if index + 1 < len(messages) else None
    failures = "\n".join(line for line in (report or "").splitlines() if "SEARCH" in line and "fail" in line)
    for call in reply.edits:
        has_failed = bool(failures) and json.loads(call.arguments)["path"] in failures
        result = "error: the SEARCH block matches no lines of the file" if has_failed else ""
        yield call, None if report is None else result


def _read_turn_work(
    messages: Sequence[Message],
    turn: int,
    indices: range,
    action_reader: ActionReader,
    reply_reader: Callable[[str], ReplyReading],
) -> _TurnWork:
    """Returns the assistant's work in the messages at `indices`, none of which is a user message."""
    work = _TurnWork(turn)
    calls: dict[str, tuple[int, MessageToolCall]] = {}
    ended = False
    for at in indices:
        message = messages[at]
        if message.answered_call_ids:
            for answer in message.answered_call_ids:
                if answer in calls:
                    index, call = calls.pop(answer)
                    work.actions.append((index, action_reader(call, message.text)))
            ended = False
        elif message.role == "assistant":
            calls.update(
                (call.id, (at, call)) for call in message.calls if call.name.lower() not in THINKING_TOOLS
            )
            ended = not message.calls and bool(message.text.strip()) and not _is_cut_off(message.text)
            if ended:
                work.reply, work.reply_index = reply_reader(message.text), at
                work.actions += [
                    (at, action_reader(call, result))
                    for call, result in _iter_edits_with_results(work.reply, messages, at)
                ]
    work.actions += [(at, action_reader(call, None)) for at, call in calls.values()]
    if not ended:
        work.reply = None
    return work


def read_frontier(
    messages: Sequence[Message],
    statement_reader: Callable[[str], tuple[Statement, ...]] = read_statements,
    action_reader: ActionReader = read_action,
    reply_reader: Callable[[str], ReplyReading] = read_reply,
) -> Frontier:
    """Reads all messages and returns the frontier of the conversation.

    Args:
        messages: All non-privileged messages of a request. An index is a position among them.
        statement_reader: Returns the statements of a user text: `core.ledger.statements.read_statements` or a
            cache of it.
        action_reader: Returns what a call did: `core.ledger.actions.read_action` or a cache of it.
        reply_reader: Returns what a reply says about the work: `read_reply` or a cache of it.
    """
    users = list(find_user_messages(messages))
    reader = _FrontierReader()
    actions: list[tuple[int, Action]] = []
    for turn, (at, stop) in enumerate(zip([-1, *users], [*users, len(messages)], strict=True), -1):
        if turn >= 0:
            reader.read_user(messages[at].text, statement_reader(messages[at].text))
        work = _read_turn_work(messages, turn, range(at + 1, stop), action_reader, reply_reader)
        actions += work.actions
        reader.read_work(work)
    reader.states.update((each.key, StatementStatus.OPEN) for each in reader.waiting_requests)
    intents = {
        at: reply_reader(each.text).last_sentence
        for at, each in enumerate(messages)
        if each.calls and each.text.strip()
    }
    return Frontier(reader.states, reader.outcomes, tuple(reader.list_loose_ends()), tuple(actions), intents)

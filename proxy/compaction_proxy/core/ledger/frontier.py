"""How far a conversation has come: which requests are answered, what came of them, and what is still open.

The order of turns decides, not the words: a request is answered once the assistant has replied to it without
a question or a failure and the user went on, unless with words on a failure. Where that does not show, the
state is unknown, and what is unknown is not called open.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from compaction_proxy.core.ledger import cues
from compaction_proxy.core.ledger.actions import Action, describe_action, describe_argument, read_action
from compaction_proxy.core.ledger.client_forms import find_user_messages
from compaction_proxy.core.ledger.cues import StatementKind
from compaction_proxy.core.ledger.facts import to_one_line
from compaction_proxy.core.ledger.statements import Statement, fold_text, read_statements
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.sanitize import remove_invisible, sanitize_text
from compaction_proxy.core.summary.injection import is_order

# Requests that wait at once, the newest; keeps time linear.
MAX_WAITING = 64
# What of a reply is looked at: its ends, in characters, and so many sentences of it.
REPLY_CHARACTERS, LAST_SENTENCES = 2_000, 4
# A message that only thanks, or only approves, is no longer, in characters.
THANKS_CHARACTERS, APPROVAL_CHARACTERS = 300, 60
# A reply that says so much beside its question has answered something, in characters.
SUBSTANCE_CHARACTERS = 240
# Quoted of a reply as what came of a request, of a question, and of a promise, in characters.
QUOTED_CHARACTERS = 160
# So many turns without a word on a failure or a promise end it, and so many leave a request unknown.
LASTING_TURNS, WAITING_TURNS = 4, 12
# A line that so many messages of at least so many statements hold is printed by a program.
PRINTED_TIMES, PRINTED_STATEMENTS = 3, 4
# A report of a failure is about an answered request if they share so many words, and so much of the shorter.
SHARED_WORDS, SHARED_PART = 2, 0.25
# A report about more words is pasted, and shares some with many requests: only the last turns count.
PASTED_WORDS = 80
# Tools by which a model only talks to itself.
THOUGHTS = frozenset({"think", "sequentialthinking", "sequential_thinking"})
# A last line of fewer words may end without a stop.
LEAST_BROKEN_WORDS = 8
# A shorter sentence tells nothing of what came of a request, in characters.
LEAST_RESULT = 12

_SENTENCE = re.compile(r"(?<=[.!?:])[\"')*_]*\s+|(?<=[。！？])\s*|\n+")  # noqa: RUF001 - stops of other scripts
_STOP = re.compile(r"[.!?:][\"')*_]?\s")
_ITEM = re.compile(r"[ \t]*(?:[-*+•#|>`]|\d{1,3}[.)])")
_FENCE = re.compile(r"^[ \t]*```.*?(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_ASKING = re.compile(r"[?？؟][\"')*_ ]*\Z")  # noqa: RUF001
# What looks more like a program than like prose.
_CODE = re.compile(r"\w\(\)|[{};=]|\w\.\w+\(|^\S+\Z")
# A bare command of the client, and what git tells of a commit.
_TYPED = re.compile(r"/\S*\Z|commit [0-9a-f]{7,40} \w+(?:\([^)]{0,40}\))?!?:")
_MARKUP = re.compile(r"^[ \t]*[#>]+[ \t]|[*`]+", re.MULTILINE)
# Underscores around words; not those of names such as `__init__` and `step_`.
_EMPHASIS = re.compile(r"(?<!\w)_([^\s_][^_\n]*)_(?!\w)")


class StatementStatus(StrEnum):
    """How far a request has come; `TOLD` is a statement that asks for nothing."""

    OPEN = "open"
    ANSWERED = "answered"
    UNKNOWN = "unknown"
    TOLD = "told"


@dataclass(frozen=True, slots=True)
class ReplyReading:
    """What a reply of the assistant says of where things stand.

    Attributes:
        asks: Whether it asks something that needs an answer.
        question: What it asks; "" for nothing, and for what may not be quoted.
        promise: What it says that the assistant is going to do; "" for nothing.
        result: A sentence that tells what came of the request; "" for none.
        last: Its last sentence; "" for what may not be quoted.
        asked: What the question is about.
        words: What its end is about, values included.
        has_substance: Whether it says more than it asks.
    """

    asks: bool = False
    question: str = ""
    promise: str = ""
    result: str = ""
    last: str = ""
    asked: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    has_substance: bool = False


@dataclass(frozen=True, slots=True)
class LooseEnd:
    """Something that the assistant or a tool has left open.

    Attributes:
        kind: `failed`, `asked back` or `to do`.
        text: One harmless line.
        at: Index of its message.
    """

    kind: str
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class LastStep:
    """The last thing that was done.

    Attributes:
        at: Index of the message with the call.
        action: The call, and how it ended.
        intent: What the assistant said it was about to do; "" where it said nothing.
    """

    at: int
    action: Action
    intent: str

    def describe(self) -> str:
        """Returns the step as one line."""
        intent = self.intent.rstrip(" .:。")
        return ": ".join(filter(None, [intent, describe_action(self.action)]))


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where a conversation stands.

    Attributes:
        states: The state of each statement by the number of its user message and its text; none for those
            that the user labelled.
        outcomes: What came of the answered ones, on one harmless line; none where nothing tells.
        loose_ends: What is left open beside requests, oldest first.
        actions: All calls that were made, each with the index of its message.
        intents: What the assistant said with its calls, by index of the message.
    """

    states: Mapping[tuple[int, str], StatementStatus] = field(default_factory=dict)
    outcomes: Mapping[tuple[int, str], str] = field(default_factory=dict)
    loose_ends: tuple[LooseEnd, ...] = ()
    actions: tuple[tuple[int, Action], ...] = ()
    intents: Mapping[int, str] = field(default_factory=dict)

    def find_last_step(self, covered: Collection[int]) -> LastStep | None:
        """Returns the last step among the covered messages; None where there is none."""
        found = next(((at, action) for at, action in reversed(self.actions) if at in covered), None)
        return LastStep(*found, self.intents.get(found[0], "")) if found else None


ActionReader = Callable[[MessageToolCall, str | None], Action]


def _split_ends(text: str) -> list[str]:
    """The sentences of a reply, from both its ends where it is long; none of its code."""
    if len(text) <= 2 * REPLY_CHARACTERS:
        return _split_sentences(text)
    return _split_sentences(text[:REPLY_CHARACTERS])[:-1] + _split_sentences(text[-REPLY_CHARACTERS:])[1:]


def _split_sentences(text: str) -> list[str]:
    prose = _FENCE.sub("\n", text)
    return [each for piece in _SENTENCE.split(prose) if (each := _strip_markup(piece))]


def _strip_markup(text: str) -> str:
    """Returns a text on one line, without the marks of headings, quotations, emphasis and code."""
    return " ".join(_EMPHASIS.sub(r"\1", _MARKUP.sub("", text)).split())


def quote_sentence(text: str) -> str:
    """Returns a sentence as one harmless line; "" for one that orders something."""
    said = _strip_markup(remove_invisible(text[: 4 * QUOTED_CHARACTERS]))
    return "" if not said or is_order(said) else sanitize_text(to_one_line(said, QUOTED_CHARACTERS))


def read_reply(text: str) -> ReplyReading:
    """Returns what a reply says of where things stand."""
    pieces = _split_ends(text)
    last = pieces[-LAST_SENTENCES:]
    asking = [each for each in last if _is_asking(each)]
    question = asking[-1] if asking else ""
    asked = _list_subjects(read_statements("\n".join(asking)))
    promises = [each for each in last if each not in asking and _is_promise(each)]
    told = [
        each
        for each in pieces
        if each not in asking and len(each) >= LEAST_RESULT and not is_pleasantry(each)
    ]
    facts = (each for each in told if not (_is_promise(each) or each.endswith(":") or _CODE.search(each)))
    result = next((line for each in facts if (line := quote_sentence(each))), "")
    substance = sum(map(len, told)) >= SUBSTANCE_CHARACTERS
    about = _list_subjects(read_statements("\n".join(pieces))) if asking and substance else asked
    promise = quote_sentence(promises[-1]) if promises else ""
    ended = quote_sentence(pieces[-1]) if pieces else ""
    return ReplyReading(
        bool(asking), quote_sentence(question), promise, result, ended, asked, about, substance
    )


def _list_subjects(statements: Sequence[Statement]) -> frozenset[str]:
    """What statements are about: stems, and exact values."""
    return frozenset(
        word for each in statements for word in (*each.words, *(value for _, value in each.values))
    )


def _is_asking(sentence: str) -> bool:
    plain = fold_text(sentence)
    if cues.OFFER.search(plain):
        return False
    return _ASKING.search(sentence) is not None or cues.ASKING_BACK.search(plain) is not None


def _is_promise(sentence: str) -> bool:
    plain = fold_text(sentence)
    return cues.PROMISE.match(plain) is not None and not cues.OFFER.search(plain)


def is_pleasantry(sentence: str) -> bool:
    """Whether a sentence only thanks, or offers help."""
    plain = fold_text(sentence)
    return cues.OFFER.search(plain) is not None or cues.THANKS.match(plain) is not None


def is_thanks(text: str, statements: Sequence[Statement]) -> bool:
    """Whether a user's message ends an exchange: it thanks or agrees, and asks for nothing."""
    short = len(text) <= THANKS_CHARACTERS and cues.THANKS.match(fold_text(text)) is not None
    asks = (each for each in statements if each.question or each.kind is StatementKind.REQUEST)
    return short and all(is_pleasantry(each.text) for each in asks)


def _is_approval(text: str) -> bool:
    """Whether a user's message only has the assistant carry out what it proposed."""
    return len(text) <= APPROVAL_CHARACTERS and cues.APPROVAL.match(fold_text(text)) is not None


def _is_failure_report(text: str) -> bool:
    """Whether a user's message says, or shows by what it pastes, that what was asked for did not succeed."""
    ends = (
        text
        if len(text) <= 2 * REPLY_CHARACTERS
        else f"{text[:REPLY_CHARACTERS]}\n{text[-REPLY_CHARACTERS:]}"
    )
    return cues.FAILURE_REPORT.search(fold_text(ends)) is not None


def _is_request(each: Statement, statements: Sequence[Statement], *, answers: bool) -> bool:
    """Whether a statement asks for something: by its words, or since the whole message does nothing else.

    Args:
        each: The statement.
        statements: All statements of its message.
        answers: Whether the message answers a question, or thanks.
    """
    if each.label or is_pleasantry(each.text) or _TYPED.match(each.folded):
        return False
    if each.kind is StatementKind.REQUEST or (each.question and each.kind is None):
        return True
    if each.kind is None and cues.WISH.search(each.folded):
        return True
    return (
        each.kind is None
        and not answers
        and not any(other.kind is StatementKind.REQUEST for other in statements)
    )


def _is_about(words: frozenset[str], request: frozenset[str]) -> bool:
    shared = len(words & request)
    return shared >= max(SHARED_WORDS, SHARED_PART * min(len(words), len(request)))


def _is_reason(each: Statement) -> bool:
    """Whether a statement in front of a request says what the request is about."""
    return each.kind is None and not each.label and len(each.words) > SHARED_WORDS


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    """A request, which nobody has answered so far.

    Attributes:
        turn: Number of its user message.
        said: The request.
        about: What it is about, and where it tells too little, what its message is about.
    """

    turn: int
    said: Statement
    about: frozenset[str]

    @property
    def key(self) -> tuple[int, str]:
        return self.turn, self.said.text


@dataclass(slots=True)
class _TurnWork:
    """What followed a user's message.

    Attributes:
        actions: The calls, each with the index of its message.
        reply: What the assistant said at the end; None where it came to no end.
        at: Index of that reply.
    """

    actions: list[tuple[int, Action]] = field(default_factory=list)
    reply: ReplyReading | None = None
    at: int = 0


class _FrontierReader:
    """Reads the turns of a conversation in order."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, str], StatementStatus] = {}
        self.outcomes: dict[tuple[int, str], str] = {}
        self.waiting: list[_OpenRequest] = []
        self.answered: list[_OpenRequest] = []
        self.times: Counter[str] = Counter()
        self.failed: dict[str, tuple[int, int, Action]] = {}
        self.promised: tuple[int, int, str] | None = None
        self.before: _TurnWork | None = None
        self.turn = -1
        self.done: list[tuple[int, Action]] = []

    def read_user(self, turn: int, text: str, statements: Sequence[Statement]) -> None:
        """Take in a message of a user: it settles what was asked before, and may ask for more."""
        if self.before is not None:
            reports, words = _is_failure_report(text), _list_subjects(statements)
            failed = self._find_answered(turn, words) if reports else []
            is_elsewhere = bool(failed) and not any(_is_about(words, each.about) for each in self.waiting)
            if not reports or is_elsewhere or is_thanks(text, statements):
                self._settle_requests(text, statements, self.before)
            self._reopen_requests(failed)
        asks = self.before is not None and self.before.reply is not None and self.before.reply.asks
        answers = asks or is_thanks(text, statements)
        about = _list_subjects(statements)
        printed = self._find_printed(statements)
        asked = {
            number
            for number, each in enumerate(statements)
            if each.text not in printed and _is_request(each, statements, answers=answers)
        }
        for number, each in enumerate(statements):
            if number in asked or (number + 1 in asked and _is_reason(each)):
                own = _list_subjects([each])
                self.waiting.append(_OpenRequest(turn, each, own if len(own) > SHARED_WORDS else about))
            elif not each.label:
                self.states[turn, each.text] = StatementStatus.TOLD
        self._mark_unknown(self.waiting[:-MAX_WAITING])
        self._mark_unknown([each for each in self.waiting if turn - each.turn > WAITING_TURNS])

    def read_turn(self, turn: int, work: _TurnWork) -> None:
        """Take in what followed."""
        self.before, self.turn = work, turn
        for at, action in work.actions:
            failure = _find_failure_key(action)
            if action.has_failed:
                self.failed[failure] = turn, at, action
            elif action.has_result:
                self.failed.pop(failure, None)
        self.done += [each for each in work.actions if each[1].is_write and not each[1].has_failed]
        if work.actions:
            self.promised = None
        if work.reply is not None and work.reply.promise:
            self.promised = turn, work.at, work.reply.promise
        for key in [key for key, (then, _, _) in self.failed.items() if turn - then >= LASTING_TURNS]:
            del self.failed[key]
        if self.promised and turn - self.promised[0] >= LASTING_TURNS:
            self.promised = None

    def _settle_requests(self, text: str, statements: Sequence[Statement], work: _TurnWork) -> None:
        """What the reply before a message of the user has answered, now that the user went on."""
        reply = work.reply
        if is_thanks(text, statements):
            self._mark_answered(self.waiting, reply)
            self._forget_failures()
            return
        if reply is None:
            return
        if not reply.asks:
            self._settle_answered(text, statements, work)
            return
        if self._has_written(work):
            self._mark_answered([each for each in self.waiting if not each.said.words & reply.asked], reply)
            return
        goes_on = (
            any(each.kind is StatementKind.REQUEST for each in statements)
            and not _list_subjects(statements) & reply.words
        )
        if reply.has_substance and goes_on and not self.failed:
            self._mark_unknown(self.waiting)

    def _settle_answered(self, text: str, statements: Sequence[Statement], work: _TurnWork) -> None:
        """What a reply without a question has answered."""
        if self._has_written(work):
            self._mark_answered(self.waiting, work.reply)
        elif any(then == self.turn for then, _, _ in self.failed.values()):
            asks_again = any(each.question or each.kind is StatementKind.REQUEST for each in statements)
            self._mark_unknown([each for each in self.waiting if asks_again and each.turn < self.turn])
        elif not _is_approval(text):
            self._mark_answered(self.waiting, work.reply)

    @staticmethod
    def _has_written(work: _TurnWork) -> bool:
        return any(
            action.is_write and not action.has_failed and action.has_result for _, action in work.actions
        )

    def _mark_answered(self, requests: Sequence[_OpenRequest], reply: ReplyReading | None) -> None:
        told = self._tell_outcome(reply)
        for each in requests:
            self.states[each.key] = StatementStatus.ANSWERED
            if told:
                self.outcomes[each.key] = told
        self.answered = [*self.answered, *requests][-MAX_WAITING:]
        self._drop_requests(requests)
        self.done.clear()

    def _find_printed(self, statements: Sequence[Statement]) -> frozenset[str]:
        """Lines that a program prints into a user's messages: they stand in many, each time among others."""
        texts = (
            frozenset(each.text for each in statements)
            if len(statements) >= PRINTED_STATEMENTS
            else frozenset()
        )
        self.times.update(texts)
        return frozenset(text for text in texts if self.times[text] >= PRINTED_TIMES)

    def _find_answered(self, turn: int, words: frozenset[str]) -> list[_OpenRequest]:
        """The answered requests of the last turns that words are about."""
        turns = LASTING_TURNS if len(words) > PASTED_WORDS else WAITING_TURNS
        recent = (each for each in self.answered if turn - each.turn < turns)
        return [each for each in recent if _is_about(words, each.about)]

    def _reopen_requests(self, requests: Sequence[_OpenRequest]) -> None:
        """Take what was answered for unanswered again."""
        for each in requests:
            self.states.pop(each.key, None)
            self.outcomes.pop(each.key, None)
        self.answered = [each for each in self.answered if each not in requests]
        self.waiting = sorted([*self.waiting, *requests], key=lambda each: each.turn)

    def _mark_unknown(self, requests: Sequence[_OpenRequest]) -> None:
        for each in requests:
            self.states[each.key] = StatementStatus.UNKNOWN
        self._drop_requests(requests)

    def _drop_requests(self, requests: Sequence[_OpenRequest]) -> None:
        gone = {each.key for each in requests}
        self.waiting = [each for each in self.waiting if each.key not in gone]

    def _forget_failures(self) -> None:
        self.failed.clear()
        self.promised = None

    def _tell_outcome(self, reply: ReplyReading | None) -> str:
        """What came of what was asked: the newest calls that changed something, else what the reply says."""
        tools = dict.fromkeys(_name_call(action) for _, action in self.done[-3:])
        if tools:
            return to_one_line("done: " + ", ".join(tools), QUOTED_CHARACTERS)
        return reply.result if reply is not None else ""

    def find_loose_ends(self) -> Iterator[LooseEnd]:
        """What is left open beside requests, oldest first."""
        found = [
            LooseEnd("failed", f"{_describe_failed(action)} → {action.outcome}", at)
            for _, at, action in self.failed.values()
        ]
        if self.promised:
            found.append(LooseEnd("to do", self.promised[2], self.promised[1]))
        if self.before is not None and self.before.reply is not None and self.before.reply.question:
            found.append(LooseEnd("asked back", self.before.reply.question, self.before.at))
        yield from sorted(found, key=lambda each: each.at)


def _name_call(action: Action) -> str:
    """A tool and the thing that it was called with."""
    return " ".join([action.tool, *(describe_argument(*each) for each in action.arguments[:1])])


def _describe_failed(action: Action) -> str:
    return " ".join([action.tool, *(value for _, value in action.arguments[:2])])


def _find_failure_key(action: Action) -> str:
    """What a later success mends: the same tool on the same thing, or the same program."""
    name, value = action.arguments[0] if action.arguments else ("", "")
    return f"{action.tool} {value if name else ' '.join(value.split()[:2])}"


def _is_cut_off(text: str) -> bool:
    """Whether a reply breaks off: it ends in the middle of a sentence, though it ends others, or of code."""
    text = text[-REPLY_CHARACTERS:].rstrip()
    last = text.rpartition("\n")[2]
    if not text or not text[-1].islower() or _ITEM.match(last) or len(last.split()) < LEAST_BROKEN_WORDS:
        return False
    return _STOP.search(text) is not None or last.count("`") % 2 == 1


def _read_work(
    messages: Sequence[Message],
    start: int,
    stop: int,
    action_reader: ActionReader,
    reply_reader: Callable[[str], ReplyReading],
) -> _TurnWork:
    """What stands between two messages of users."""
    found = _TurnWork()
    made: dict[str, tuple[int, MessageToolCall]] = {}
    ended = False
    for at in range(start, stop):
        message = messages[at]
        if message.answers:
            for answer in message.answers:
                if answer in made:
                    where, call = made.pop(answer)
                    found.actions.append((where, action_reader(call, message.text)))
            ended = False
        elif message.role == "assistant":
            made.update((call.id, (at, call)) for call in message.calls if call.name.lower() not in THOUGHTS)
            ended = not message.calls and bool(message.text.strip()) and not _is_cut_off(message.text)
            if ended:
                found.reply, found.at = reply_reader(message.text), at
    found.actions += [(at, action_reader(call, None)) for at, call in made.values()]
    if not ended:
        found.reply = None
    return found


def read_frontier(
    messages: Sequence[Message],
    statement_reader: Callable[[str], tuple[Statement, ...]] = read_statements,
    action_reader: ActionReader = read_action,
    reply_reader: Callable[[str], ReplyReading] = read_reply,
) -> Frontier:
    """Returns where a conversation stands.

    Args:
        messages: All non-privileged messages of a request; an index is a position among them.
        statement_reader: What a user's text states; `core.ledger.statements.statements`, or a memory of it.
        action_reader: What a call did; `core.ledger.actions.read_action`, or a memory of it.
        reply_reader: What a reply says; `read_reply`, or a memory of it.
    """
    users = list(find_user_messages(messages))
    reader = _FrontierReader()
    actions: list[tuple[int, Action]] = []
    for turn, (at, stop) in enumerate(zip([-1, *users], [*users, len(messages)], strict=True), -1):
        if turn >= 0:
            reader.read_user(turn, messages[at].text, statement_reader(messages[at].text))
        follows = _read_work(messages, at + 1, stop, action_reader, reply_reader)
        actions += follows.actions
        reader.read_turn(turn, follows)
    for each in reader.waiting:
        reader.states[each.key] = StatementStatus.OPEN
    spoken = ((at, each.text) for at, each in enumerate(messages) if each.calls and each.text.strip())
    intents = {at: reply_reader(text).last for at, text in spoken}
    return Frontier(reader.states, reader.outcomes, tuple(reader.find_loose_ends()), tuple(actions), intents)

"""Tracks which user statements are in force; later statements replace earlier ones.

Two statements are about the same subject if most of their words are the same. Exact values, and small words
such as "always" or "the", are not compared. If the later statement changes a value, it replaces the earlier
one. In doubt, both statements stay in force. Losing a rule does more harm than keeping an outdated rule that
is followed by its replacement.

Which statements are in force after a message depends only on that message and on the messages before it. So
when a conversation grows, the result for its earlier messages is reused, and only the new messages are read.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Self

from compaction_proxy.core.ledger.client_forms import find_user_messages
from compaction_proxy.core.ledger.cues import StatementKind, has_cue
from compaction_proxy.core.ledger.statements import Statement, fold_text, read_statements
from compaction_proxy.core.ledger.values import IDENTIFYING_KINDS
from compaction_proxy.core.message import Message

# For each of its words, a new statement is compared with at most this many of the newest statements that
# contain the word. The limit keeps the time linear in the number of statements.
MAX_COMPARED = 64
# The values of at most this many statements that were replaced, the newest, are looked for in all statements
# in force. The limit keeps the time linear in the number of statements.
MAX_REPLACED_STATEMENTS = 1_000
# Number of leading characters of a message that are searched for words that close an earlier request, such as
# "never mind".
CLOSING_CHARACTERS = 80
# The weight of each kind of statement. The greater the weight, the more harm the loss of a statement does.
_KIND_WEIGHTS = {
    StatementKind.FACT: 1,
    StatementKind.DECISION: 2,
    StatementKind.PREFERENCE: 2,
    StatementKind.REQUEST: 3,
    StatementKind.RULE: 4,
}
_PUNCTUATION = ".,;:!?()\"'"
# Words after which a number is an amount, and does not name a thing.
_BEFORE_AMOUNTS = frozenset(
    {
        "is",
        "are",
        "be",
        "was",
        "of",
        "to",
        "at",
        "by",
        "for",
        "from",
        "with",
        "than",
        "most",
        "least",
        "exactly",
    }
    | {"maximum", "minimum", "max", "min", "limit", "only", "about", "within", "in", "over", "under", "above"}
    | {"below", "per", "every", "after", "before", "up", "use", "keep"}
)
# Kinds of values that name a thing. A person's name is left out: if it changes, somebody else is in charge.
_THING_KINDS = IDENTIFYING_KINDS - {"name"}
_CLAUSE_END = re.compile(r",? (?:and|und|y|et|e|и) |[,;，；、] ?")  # noqa: RUF001 - punctuation of many scripts


def _changes_value(new: Statement, old: Statement) -> bool:
    """Returns whether `new` has values of all the kinds that `old` has, but not exactly the same values."""
    return bool(old.kinds) and old.kinds <= new.kinds and new.values != old.values


def _differs_in_one_word(new: Statement, old: Statement) -> bool:
    """Returns whether the statements are the same except for their values and one other word.

    The different word shows that the two statements are about different things.
    """
    if len(new.words - old.words) != 1 or len(old.words - new.words) != 1:
        return False
    ours, theirs = new.folded_text.split(), old.folded_text.split()
    others = sum(one != other for one, other in zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) and others <= 1 + len(new.values)


def _may_both_hold(new: Statement, old: Statement) -> bool:
    """Returns whether two rules may be about two things, so that the later one does not replace the other.

    They may if they differ in more than one amount, time, name or similar value. A number right after a word
    such as "user" names a thing.
    """
    changed = new.values ^ old.values
    if len(old.values - new.values) > 1 or any(kind in _THING_KINDS for kind, _ in changed):
        return True
    ours, theirs = new.folded_text.split(), old.folded_text.split()
    places = [k for k, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other]
    if len(ours) != len(theirs) or len(places) > len(ours) // 2:
        return False  # the rules are worded in different ways
    texts = " ".join(text for _, text in changed)
    numbers = {text for kind, text in changed if kind == "number"}
    for place in places:
        value, before = ours[place].strip(_PUNCTUATION), ours[place - 1]
        if value not in texts or (value in numbers and before.isalpha() and before not in _BEFORE_AMOUNTS):
            return True
    return False


def _corrects_statement(new: Statement, old: Statement, shared_words: int, *, has_same_label: bool) -> bool:
    """Returns whether `new` replaces `old`, given that `new` says that it changes something.

    `shared_words` is the number of words that both statements contain.
    """
    if old.values and new.values and not _changes_value(new, old):
        return False
    if (
        old.kind is StatementKind.RULE
        and new.kind not in {StatementKind.RULE, StatementKind.PREFERENCE}
        and not old.values
    ):
        # A statement that is no rule may correct something else about the subject of a rule. So `new`
        # replaces a rule only if it repeats most words of the rule.
        return shared_words == len(old.words) or (shared_words >= 2 and shared_words >= 0.6 * len(old.words))
    smaller = min(len(new.words), len(old.words))
    known = new.kind is not None or bool(new.values)
    return known and shared_words >= 0.5 * smaller and (shared_words >= 2 or smaller <= 2 or has_same_label)


def _replaces_value(
    new: Statement, old: Statement, shared_words: int, *, is_adjacent: bool, has_same_label: bool
) -> bool:
    """Returns whether `new` replaces `old`, given that `new` contains another value of the same kind.

    `new` replaces `old` if both have the same subject. `shared_words` is the number of words that both
    statements contain.
    """
    smaller = min(len(new.words), len(old.words))
    if has_same_label:
        return shared_words >= 0.3 * smaller
    if old.kind is StatementKind.RULE and _may_both_hold(new, old):
        return False
    if shared_words < (0.5 if is_adjacent else 0.7) * smaller or shared_words < min(2, smaller):
        return False
    asked = StatementKind.REQUEST in {new.kind, old.kind} and old.kinds & IDENTIFYING_KINDS
    return not (asked or _differs_in_one_word(new, old))


def _has_same_subject(new: Statement, old: Statement, shared_words: int) -> bool:
    subjects = len(new.subject_words & old.subject_words)
    whole = shared_words >= 0.4 * min(len(new.words), len(old.words))
    return whole or subjects >= 0.5 * max(1, min(len(new.subject_words), len(old.subject_words)))


def supersedes_statement(new: Statement, old: Statement, *, is_adjacent: bool) -> bool:
    """Returns whether `new`, from a later message, replaces `old`.

    `is_adjacent` is true if no other user message comes between the messages of the two statements.
    """
    shared = len(new.words & old.words)
    if not shared or new.is_question:
        return False
    if new.folded_text == old.folded_text:
        return True
    relabelled = is_adjacent and bool(new.label) and new.label == old.label
    if old.kind is StatementKind.RULE and " " not in new.label:
        relabelled = False  # "RULE:" begins any rule, but "SAFETY RULE:" names one
    if new.is_correction:
        return _corrects_statement(new, old, shared, has_same_label=relabelled)
    if _changes_value(new, old):
        return not new.is_addition and _replaces_value(
            new, old, shared, is_adjacent=is_adjacent, has_same_label=relabelled
        )
    return (
        relabelled
        and not (new.is_addition or new.values or old.values)
        and _has_same_subject(new, old, shared)
    )


def find_unreplaced_part(new: Statement, old: Statement) -> Statement | None:
    """Returns `old` without the parts in which `new` changes a value.

    Returns None if `new` leaves `old` as it is or replaces all of it. The remaining parts are quoted as
    written. If no part remains, the returned statement has an empty text.
    """
    if (
        new.is_question
        or new.is_addition
        or new.kind is StatementKind.REQUEST
        or new.kinds.isdisjoint(old.kinds)
    ):
        return None
    if not new.words <= old.words and not (
        new.is_correction and len(new.words & old.words) >= 0.5 * len(new.words)
    ):
        return None
    changed = new.kinds & {kind for kind, _ in old.values - new.values}
    if not changed or _changes_value(new, old):
        return None
    old_values = [text for kind, text in old.values - new.values if kind in changed]
    parts = _CLAUSE_END.split(old.text)
    text = "; ".join(part for part in parts if not any(value in part.casefold() for value in old_values))
    values = frozenset(value for value in old.values if value[1] in text.casefold())
    kinds = frozenset(kind for kind, _ in values)
    return replace(old, text=text, values=values, folded_text=fold_text(text), kinds=kinds)


@dataclass(frozen=True, slots=True)
class UserStatement:
    """A user statement that no later one has replaced as a whole, and its place in the conversation.

    Attributes:
        statement: The statement, or the part of it that is still in force.
        turn: Index of the statement's message among the user messages.
        kind: The kind of the statement; None if the statement is closed or has no kind. If the
            statement replaced another one, this is the one of their two kinds with the greater weight.
        is_closed: Whether a later message says that the request is done, or takes back the request or rule.
        is_withdrawn: Whether a later message takes the statement back. The ledger then does not quote it.
    """

    statement: Statement
    turn: int
    kind: StatementKind | None
    is_closed: bool = False
    is_withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class SupersededStatements:
    """User statements that are no longer in force.

    Attributes:
        texts_by_message: The statements word for word, by the index of their message.
        values: Values, in lower case, that the newest of these statements contain
            (`MAX_REPLACED_STATEMENTS`) and that no statement in force contains.
    """

    texts_by_message: Mapping[int, tuple[str, ...]]
    values: frozenset[str]


@dataclass(slots=True)
class _StatementIndex:
    """The user statements in force, with an index by which statements are found by their words.

    Each statement has a number. The numbers follow the order in which the user made the statements.

    Attributes:
        statements: The statements in force, by number.
        replaced: The statements that later ones replaced in whole or in part, by number. Each is kept as the
            user made it.
        count: Number of all statements that were added so far.
    """

    statements: dict[int, UserStatement] = field(default_factory=dict)
    replaced: dict[int, UserStatement] = field(default_factory=dict)
    count: int = 0
    _by_word: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _request_keys: list[int] = field(default_factory=list)

    def copy(self) -> Self:
        """Returns an independent copy. Statements added to the copy do not change the original."""
        by_word: defaultdict[str, list[int]] = defaultdict(list)
        by_word.update((word, list(held)) for word, held in self._by_word.items())
        return type(self)(
            dict(self.statements), dict(self.replaced), self.count, by_word, list(self._request_keys)
        )

    def add(self, spoken: UserStatement) -> None:
        """Adds a statement, and removes or shortens statements of earlier messages that it replaces."""
        keys: set[int] = set()
        for word in spoken.statement.words:
            del self._by_word[word][:-MAX_COMPARED]
            keys.update(self._by_word[word])
        for key in sorted(keys):
            old = self.statements[key]
            if old.turn == spoken.turn:
                continue
            if supersedes_statement(spoken.statement, old.statement, is_adjacent=spoken.turn == old.turn + 1):
                self._remove_statement(key)
                kind = max(spoken.kind, old.kind, key=lambda kind: _KIND_WEIGHTS[kind] if kind else 0)
                spoken = replace(spoken, kind=kind)
            elif remainder := find_unreplaced_part(spoken.statement, old.statement):
                self.replaced.setdefault(key, old)
                self.statements[key] = replace(old, statement=remainder)
        self.statements[self.count] = spoken
        for word in spoken.statement.words:
            self._by_word[word].append(self.count)
        if spoken.kind is StatementKind.REQUEST and not spoken.statement.label:
            self._request_keys.append(self.count)
        self.count += 1

    def _remove_statement(self, key: int) -> None:
        old = self.statements.pop(key)
        self.replaced.setdefault(key, old)
        for word in old.statement.words:
            if key in (held := self._by_word[word]):
                held.remove(key)

    def close_newest_request(self, turn: int, *, withdraws: bool) -> None:
        """Closes the newest request that does not begin with a label such as "TODO:".

        If `withdraws` is true, and the user message before the closing message states rules but makes no
        request, the newest of these rules is closed instead. Rules and requests with a label do not count.

        Args:
            turn: Index of the message that closes the request, among the user messages.
            withdraws: Whether the closing message only takes back an earlier request or rule.
        """
        self._request_keys = [key for key in self._request_keys[-MAX_COMPARED:] if key in self.statements]
        newest = islice(reversed(self.statements), MAX_COMPARED)
        before = [key for key in newest if self.statements[key].turn == turn - 1]
        rules = [
            key
            for key in before
            if self.statements[key].kind is StatementKind.RULE and not self.statements[key].statement.label
        ]
        if withdraws and rules and not any(key in self._request_keys for key in before):
            self._close_statement(rules[0], withdraws=True)
        elif self._request_keys:
            self._close_statement(self._request_keys.pop(), withdraws=withdraws)

    def _close_statement(self, key: int, *, withdraws: bool) -> None:
        self.statements[key] = replace(
            self.statements[key], kind=None, is_closed=True, is_withdrawn=withdraws
        )


def list_user_texts(messages: Sequence[Message]) -> list[str]:
    """Returns the texts that users wrote themselves, in order."""
    return [messages[index].text for index in find_user_messages(messages)]


class ActiveStatements:
    """The user statements that are in force after the last message, and those that later ones replaced.

    Args:
        messages: All non-privileged messages of a request. An index is a position among them.
        statement_reader: Returns the statements of a text: `core.ledger.statements.read_statements` or a
            cache of it.
        earlier: The result for an earlier list of messages. The user texts of that list must be the first
            user texts in `messages` (see `is_prefix_of`), and only the user texts after them are read.
            `earlier` is not changed.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        statement_reader: Callable[[str], tuple[Statement, ...]] = read_statements,
        earlier: Self | None = None,
    ) -> None:
        self._message_indices = list(find_user_messages(messages))
        self._texts = [messages[index].text for index in self._message_indices]
        self.statement_index: _StatementIndex = (
            earlier.statement_index.copy() if earlier else _StatementIndex()
        )
        for turn in range(len(earlier or ()), len(self)):
            self._read_turn(turn, statement_reader)

    def __len__(self) -> int:
        """Returns the number of user messages that were read."""
        return len(self._texts)

    @property
    def statement_count(self) -> int:
        """Number of statements in the user messages."""
        return self.statement_index.count

    def is_prefix_of(self, texts: Sequence[str]) -> bool:
        """Returns whether the list `texts` begins with the user texts of this object.

        Returns False if this object has read no text.
        """
        length = len(self)
        if not 0 < length <= len(texts) or self._texts[-1] != texts[length - 1]:
            return False
        return self._texts == texts[:length]

    def _read_turn(self, turn: int, statement_reader: Callable[[str], tuple[Statement, ...]]) -> None:
        text = self._texts[turn]
        said_first = fold_text(text[:CLOSING_CHARACTERS])
        if has_cue(said_first, "closing"):
            withdraws = len(text) < CLOSING_CHARACTERS and has_cue(said_first, "withdrawal")
            self.statement_index.close_newest_request(turn, withdraws=withdraws)
        for each in statement_reader(text):
            self.statement_index.add(UserStatement(each, turn, each.kind))

    def list_statements_in_messages(self, covered: Collection[int]) -> list[tuple[int, UserStatement]]:
        """Returns the statements in force in the messages at the indices `covered`.

        Each comes with the index of its message. Statements with an empty text are left out.
        """
        placed = (
            (self._message_indices[spoken.turn], spoken)
            for spoken in self.statement_index.statements.values()
        )
        return [(at, spoken) for at, spoken in placed if at in covered and spoken.statement.text]

    @cached_property
    def superseded(self) -> SupersededStatements:
        """The statements that later messages have replaced. No summary may state them as valid again."""
        lost = [self.statement_index.replaced[key] for key in sorted(self.statement_index.replaced)]
        standing = self.statement_index.statements.values()
        standing_texts = {(spoken.turn, spoken.statement.text) for spoken in standing}
        replaced = [spoken for spoken in lost if (spoken.turn, spoken.statement.text) not in standing_texts]
        texts: defaultdict[int, list[str]] = defaultdict(list)
        for spoken in replaced:
            texts[self._message_indices[spoken.turn]].append(spoken.statement.text)
        newest = replaced[-MAX_REPLACED_STATEMENTS:]
        values = {value for spoken in newest for _, value in spoken.statement.values}
        valid = " ".join(spoken.statement.text for spoken in standing).casefold() if values else ""
        return SupersededStatements(
            {at: tuple(each) for at, each in texts.items()},
            frozenset(value for value in values if value not in valid),
        )

"""Decides when one user statement replaces another.

Two statements are about the same subject if they consist of mostly the same words. Exact values, and small
words such as "always" or "the", do not count. If the later statement changes a value, it replaces the earlier
one. In doubt both statements stay in force: a lost rule costs more than an outdated rule that is followed by
its replacement.
"""

import re
from dataclasses import replace

from compaction_proxy.core.ledger.cues import StatementKind
from compaction_proxy.core.ledger.statements import Statement, fold_text
from compaction_proxy.core.ledger.values import IDENTIFYING_KINDS

_CLAUSE_END = re.compile(r",? (?:and|und|y|et|e|и) |[,;，；、] ?")  # noqa: RUF001 - punctuation of many scripts


def _changes_value(new: Statement, old: Statement) -> bool:
    """Returns whether `new` has values of all the kinds that `old` has, and at least one value differs."""
    return bool(old.kinds) and old.kinds <= new.kinds and new.values != old.values


def _differs_in_one_word(new: Statement, old: Statement) -> bool:
    """Returns whether the statements are the same except for their values and one other word.

    That word then shows that the two statements are about different things.
    """
    if len(new.words - old.words) != 1 or len(old.words - new.words) != 1:
        return False
    ours, theirs = new.folded_text.split(), old.folded_text.split()
    others = sum(one != other for one, other in zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) and others <= 1 + len(new.values)


def _corrects_statement(new: Statement, old: Statement, shared_words: int, *, has_same_label: bool) -> bool:
    """Returns whether `new`, which says that it changes something, changes `old`.

    `shared_words` is the number of words that both statements contain.
    """
    if old.values and new.values and not _changes_value(new, old):
        return False
    if (
        old.kind is StatementKind.RULE
        and new.kind not in {StatementKind.RULE, StatementKind.PREFERENCE}
        and not old.values
    ):
        # A statement that is no rule may correct something else about the subject of a rule. The rule is
        # replaced only if most of its words are repeated.
        return shared_words == len(old.words) or (shared_words >= 2 and shared_words >= 0.6 * len(old.words))
    smaller = min(len(new.words), len(old.words))
    known = new.kind is not None or bool(new.values)
    return known and shared_words >= 0.5 * smaller and (shared_words >= 2 or smaller <= 2 or has_same_label)


def _replaces_value(
    new: Statement, old: Statement, shared_words: int, *, is_adjacent: bool, has_same_label: bool
) -> bool:
    """Returns whether `new`, which has another value of the same kind, is about the same subject as `old`.

    `shared_words` is the number of words that both statements contain.
    """
    smaller = min(len(new.words), len(old.words))
    if has_same_label:
        return shared_words >= 0.3 * smaller
    if shared_words < (0.5 if is_adjacent else 0.7) * smaller or shared_words < min(2, smaller):
        return False
    asked = StatementKind.REQUEST in {new.kind, old.kind} and old.kinds & IDENTIFYING_KINDS
    return not (asked or _differs_in_one_word(new, old))


def _has_same_subject(new: Statement, old: Statement, shared_words: int) -> bool:
    subjects = len(new.subject_words & old.subject_words)
    whole = shared_words >= 0.4 * min(len(new.words), len(old.words))
    return whole or subjects >= 0.5 * max(1, min(len(new.subject_words), len(old.subject_words)))


def may_supersede(new: Statement, old: Statement) -> bool:
    """Returns whether `new` may replace `old` or a part of it. This test quickly excludes most pairs."""
    if new.folded_text == old.folded_text:
        return True
    if new.is_question:
        return False
    if new.is_correction or (new.label and new.label == old.label):
        return True
    if new.is_addition or (new.kind is StatementKind.REQUEST and not old.kinds.isdisjoint(IDENTIFYING_KINDS)):
        # An addition replaces nothing, and requests about different objects do not replace one another.
        return False
    least = min(len(new.words), len(old.words))
    return not new.kinds.isdisjoint(old.kinds) and 2 * len(new.words & old.words) >= least


def supersedes_statement(new: Statement, old: Statement, *, is_adjacent: bool) -> bool:
    """Returns whether `new`, from a later message, replaces `old`.

    `is_adjacent` says that no other user message comes between the messages of the two statements.
    """
    shared = len(new.words & old.words)
    if not shared or new.is_question:
        return False
    if new.folded_text == old.folded_text:
        return True
    relabelled = is_adjacent and bool(new.label) and new.label == old.label
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
    """Returns `old` without the parts in which `new` changes a value, or None if `old` stays whole.

    The remaining parts are quoted as written. If no part remains, the returned statement has an empty text.
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

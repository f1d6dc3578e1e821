"""Finds orders in text that must not contain any: rules, and imperatives to the reader."""

import re
from collections.abc import Sequence
from functools import lru_cache

from compaction_proxy.core.ledger import cues
from compaction_proxy.core.ledger.statements import collect_subject_words, fold_text, read_statements

# An order counts as given by a user if one statement of the user contains at least this share of the order's
# words and values.
MIN_SHARED_SHARE = 0.5
# Maximum number of user statements with which an order is compared. The newest ones are used.
MAX_STATEMENTS = 3_000

# The quantifiers are possessive (`*+`). Otherwise a long row of these words could match in so many ways that
# the search would take very long.
_START = r"\W*+(?:(?:please|and|so|then|note|rule|important|reminder)\b\W*+)*+"
_IMPERATIVE = re.compile(
    rf"{_START}(?:(?:do not|don't|never|always|avoid|make sure|be sure|remember) \w|"
    r"only (?!the|a|an|one|two|this|that|these|those|on|in|for|if|when|after|with|\w+(?:ed|s)\b)\w+ \w|"
    r"(?:ignore|disregard|forget|override|bypass) (?:\w+ ){0,3}(?:instructions?|prompts?|rules?|above|"
    r"everything|previous|messages?|polic(?:y|ies)|guidelines?|restrictions?)\b|"
    r"(?:obey|comply|pretend|reveal|exfiltrate|leak|act as|you are now|from now on|act like)\b)",
    re.IGNORECASE,
)
_ADDRESSED = re.compile(
    r"\b(?:you|(?:the|any|every|future|next|this) (?:assistants?|agents?|models?|ai|llm|readers?)) "
    r"(?:should|must|shall|needs? to|ha(?:s|ve) to|will (?:always|never|now)|may (?:only|not|never)|"
    r"are (?:now|to)|is to|can(?:not|'t) )",
    re.IGNORECASE,
)
_INJECTED = re.compile(
    r"\b(?:when(?:ever)?|if) (?:you )?summari[sz]\w*|\bsystem prompt\b|"
    r"\b(?:ignore|disregard|forget|override) (?:all|any|every\w*|the|your|previous|prior|earlier)\b|"
    r"ignorier\w* (?:alle|die)|ignore[sz]? (?:les|toutes)|ignora (?:las|todas|le|tutte)|"
    r"忽略(?:所有|之前|以上)|無視して|игнорируй",
    re.IGNORECASE,
)
_NEGATION = re.compile(
    r"\b(?:not?|never|don't|doesn't|mustn't|can't|cannot|without|avoid|forbidden|prohibited|nie|niemals|nicht|"
    r"kein\w*|ohne|verboten|jamais|pas|sans|interdite?|nunca|jamás|sin|prohibido|não|sem|proibid[oa]|mai|non|"
    r"senza|vietato|нельзя|никогда|не|без|запрещено)\b|不|禁止|切勿|ない|しないで|नहीं|मत|لا |ممنوع|يُمنع",
)


def reads_as_order(sentence: str) -> bool:
    """Returns whether a sentence reads as a rule or as an order to its reader."""
    plain = fold_text(sentence)
    if _INJECTED.search(plain) or _IMPERATIVE.match(plain) or _ADDRESSED.search(plain):
        return True
    return cues.RULE.search(cues.NARRATIVE.sub(" ", plain)) is not None


# The check of one summary needs the statements of the same texts many times. A larger cache would keep many
# conversations in memory.
@lru_cache(maxsize=2)
def _list_user_statements(texts: tuple[str, ...]) -> tuple[tuple[frozenset[str], bool], ...]:
    """Returns the newest statements of a user: for each, its words and values, and whether it is negated."""
    found: list[tuple[frozenset[str], bool]] = []
    for text in reversed(texts):
        found += [
            (collect_subject_words([each]), bool(_NEGATION.search(fold_text(each.text))))
            for each in read_statements(text)
        ]
        if len(found) >= MAX_STATEMENTS:
            break
    return tuple(found[:MAX_STATEMENTS])


def is_backed_by_user(order: str, user_texts: Sequence[str]) -> bool:
    """Returns whether some statement of a user says the same as `order`.

    Both must be negated, or neither.
    """
    about, negated = collect_subject_words(read_statements(order)), bool(_NEGATION.search(fold_text(order)))
    return bool(about) and any(
        negated == sign and len(about & words) >= MIN_SHARED_SHARE * len(about)
        for words, sign in _list_user_statements(tuple(user_texts))
    )

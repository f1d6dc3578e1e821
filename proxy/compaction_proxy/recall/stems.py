"""Stems English words with M. F. Porter's stemmer and a table of irregular forms.

Two words count as forms of one word if their stems are equal. A stem need not be a word. The stemmer knows
only English endings. A word with characters other than a to z, or with less than three letters, is its own
stem.
Source: M. F. Porter, "An algorithm for suffix stripping", Program 14 (1980) 130-137.
"""

import re
from collections.abc import Iterator
from itertools import groupby

_LETTERS = re.compile(r"[a-z]{3,}")
# Pairs of an ending and its replacement. A longer ending comes before the shorter endings that it contains,
# so that the longest matching ending is replaced.
_STEP_2 = (
    ("ational", "ate"), ("ization", "ize"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous"),
    ("tional", "tion"), ("biliti", "ble"), ("entli", "ent"), ("ousli", "ous"), ("ation", "ate"),
    ("alism", "al"), ("aliti", "al"), ("iviti", "ive"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"),
    ("alli", "al"), ("ator", "ate"), ("logi", "log"), ("bli", "ble"), ("eli", "e"),
)  # fmt: skip
_STEP_3 = (
    ("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ness", ""),
    ("ful", ""),
)  # fmt: skip
_STEP_4 = tuple(
    (ending, "")
    for ending in (
        "ement", "ance", "ence", "able", "ible", "ment", "ant", "ent", "sion", "tion", "ism", "ate", "iti",
        "ous", "ive", "ize", "al", "er", "ic", "ou",
    )
)  # fmt: skip
# Each entry lists the forms of one word, with the basic form first. A form that two words share (left, found,
# saw) is listed only for the word that is meant most often.
_IRREGULAR = (
    "be am is are was were been being", "go went gone goes", "have has had", "do does did done", "say said",
    "get got gotten", "make made", "know knew known", "think thought", "take took taken", "see saw seen",
    "come came", "find found", "give gave given", "tell told", "feel felt", "become became", "leave left",
    "bring brought", "begin began begun", "keep kept", "hold held", "write wrote written", "stand stood",
    "hear heard", "mean meant", "meet met", "run ran", "pay paid", "sit sat", "speak spoke spoken",
    "lead led", "grow grew grown", "lose lost", "fall fell fallen", "send sent", "build built",
    "understand understood", "draw drew drawn", "break broke broken", "spend spent", "rise rose risen",
    "drive drove driven", "buy bought", "wear wore worn", "choose chose chosen", "eat ate eaten",
    "teach taught", "catch caught", "sing sang sung", "swim swam swum", "fly flew flown", "win won",
    "sell sold", "sleep slept", "forget forgot forgotten", "drink drank drunk", "ride rode ridden",
    "throw threw thrown", "fight fought", "shoot shot", "steal stole stolen", "hide hid hidden",
    "bite bit bitten", "wake woke woken", "shake shook shaken", "freeze froze frozen", "dig dug",
    "hang hung", "stick stuck", "swing swung", "strike struck", "seek sought", "light lit", "feed fed",
    "bend bent", "lend lent", "lie lay lain", "show showed shown", "bind bound", "blow blew blown",
    "breed bred", "deal dealt", "dream dreamt", "flee fled", "forgive forgave forgiven", "grind ground",
    "kneel knelt", "learn learnt", "overcome overcame", "prove proven", "ring rang rung", "shine shone",
    "shrink shrank shrunk", "sink sank sunk", "slide slid", "spin spun", "spring sprang sprung",
    "swear swore sworn", "sweep swept", "tear tore torn", "undo undid undone", "weave wove woven",
    "weep wept", "withdraw withdrew withdrawn", "rewrite rewrote rewritten", "child children", "man men",
    "woman women", "person people", "foot feet", "tooth teeth", "goose geese", "mouse mice", "life lives",
    "wife wives", "knife knives", "leaf leaves", "half halves", "shelf shelves", "wolf wolves",
    "index indices", "matrix matrices", "vertex vertices", "criterion criteria", "analysis analyses",
    "good better best", "bad worse worst",
)  # fmt: skip
_BASE_FORMS = {form: forms.split()[0] for forms in _IRREGULAR for form in forms.split()}


def stem_word(word: str) -> str:
    """Returns the stem of a word, which must be in lower case."""
    return _strip_final_letter(_strip_suffixes(_strip_inflection(word))) if _LETTERS.fullmatch(word) else word


def find_word_root(word: str) -> str:
    """Returns the stem of a word in lower case. For an irregular form, returns the stem of its basic form."""
    return stem_word(_BASE_FORMS.get(word, word))


def list_irregular_forms(word_root: str) -> tuple[str, ...]:
    """Returns all forms of the irregular words with this root, including their basic forms."""
    return _FORMS_BY_ROOT.get(word_root, ())


def _group_irregular_forms_by_stem() -> Iterator[tuple[str, tuple[str, ...]]]:
    by_root = sorted((find_word_root(form), form) for form in _BASE_FORMS)
    for of, pairs in groupby(by_root, key=lambda pair: pair[0]):
        yield of, tuple(form for _, form in pairs)


def _classify_letters(word: str) -> str:
    """Returns a string with `v` for each vowel of a word and `c` for each consonant.

    A y after a consonant is a vowel.
    """
    shape = ""
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and shape.endswith("c"))
        shape += "v" if vowel else "c"
    return shape


def _count_vowel_groups(word: str) -> int:
    """Returns the number of vowel groups of a word that a consonant follows (Porter's measure m)."""
    return _classify_letters(word).count("vc")


def _ends_in_double_consonant(word: str) -> bool:
    return word[-2:-1] == word[-1:] and _classify_letters(word).endswith("c")


def _is_short(word: str) -> bool:
    """Returns whether a word ends in consonant, vowel, consonant (but not w, x or y).

    Such a word may have lost a final e, as in hop(e)-ing.
    """
    return _classify_letters(word).endswith("cvc") and word[-1] not in "wxy"


def _strip_inflection(word: str) -> str:
    """Step 1: removes plural endings, -ed and -ing, then corrects the end of what remains."""
    if word.endswith(("sses", "ies")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    if word.endswith("eed"):
        word = word[:-1] if _count_vowel_groups(word[:-3]) else word
    else:
        for ending in ("ed", "ing"):
            rest = word.removesuffix(ending)
            if rest != word and "v" in _classify_letters(rest):
                word = _restore_final_letter(rest)
                break
    return word[:-1] + "i" if word.endswith("y") and "v" in _classify_letters(word[:-1]) else word


def _restore_final_letter(word: str) -> str:
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _ends_in_double_consonant(word) and word[-1] not in "lsz":
        return word[:-1]
    return word + "e" if _count_vowel_groups(word) == 1 and _is_short(word) else word


def _strip_suffixes(word: str) -> str:
    """Steps 2 to 4: removes suffixes, the outermost first."""
    word = _replace_ending(word, _STEP_2, 1)
    word = _replace_ending(word, _STEP_3, 1)
    return _replace_ending(word, _STEP_4, 2)


def _replace_ending(word: str, endings: tuple[tuple[str, str], ...], least: int) -> str:
    for ending, by in endings:
        if word.endswith(ending):
            kept = ending[:1] if ending in {"sion", "tion"} else ""
            rest = word[: -len(ending)] + kept
            return rest + by if _count_vowel_groups(rest) >= least else word
    return word


def _strip_final_letter(word: str) -> str:
    """Step 5: removes a final e, and one of two final l."""
    if word.endswith("e"):
        rest = word[:-1]
        if _count_vowel_groups(rest) > 1 or (_count_vowel_groups(rest) == 1 and not _is_short(rest)):
            word = rest
    return word[:-1] if word.endswith("ll") and _count_vowel_groups(word) > 1 else word


_FORMS_BY_ROOT = dict(_group_irregular_forms_by_stem())

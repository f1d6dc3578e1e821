"""Finds the stems of English words, with Porter's stemmer (from the library snowballstemmer).

A stem is a word without its endings. It need not be a word itself. Two words count as forms of the same word
if their stems are equal. A table maps irregular forms to their basic form, because the stemmer knows only
regular English endings. A word with other characters than the letters a to z, or with fewer than three
letters, is its own stem.
"""

import re
from functools import lru_cache
from pkgutil import resolve_name

_STEMMER = "snowballstemmer:stemmer"  # imported if used: it takes 14 MB of memory
_CACHED_STEMS = 16_384  # number of words; the stemmer takes 40 µs for each
_LETTERS = re.compile(r"[a-z]{3,}")
# Each text lists the forms of one irregular word, with the basic form first. A form that belongs to two
# words, such as left, found or saw, is listed only for the more common word.
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


@lru_cache(maxsize=_CACHED_STEMS)
def stem_word(word: str) -> str:
    """Returns the stem of a word, which must be in lower case."""
    if not _LETTERS.fullmatch(word):
        return word
    # Several threads call this function, and a stemmer keeps the current word in its attributes. Each call
    # therefore creates a stemmer of its own.
    stem: str = resolve_name(_STEMMER)("porter").stemWord(word)
    return stem


def find_word_root(word: str) -> str:
    """Returns the stem of a word in lower case. For an irregular form, returns the stem of its basic form."""
    return stem_word(_BASE_FORMS.get(word, word))


def list_irregular_forms(word_root: str) -> list[str]:
    """Returns the forms of the irregular words whose root is `word_root`, including their basic forms."""
    return sorted(form for form in _BASE_FORMS if find_word_root(form) == word_root)

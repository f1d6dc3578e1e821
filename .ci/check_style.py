"""Checks that the texts that users meet are plain technical English, in the terms of docs/glossary.md.

    python .ci/check_style.py [FILE…]

Prints a line for each finding: file, line, the words, the sentence, and advice. Without files it reads all
texts that tools/user_texts.py lists. A file that is not among them is read as Markdown.
"""

# ruff: noqa: INP001, T201 - a script prints

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from user_texts import UserText, list_markdown, list_texts, split_sentences  # noqa: E402

# Words of a sentence, or of the parts before and after a colon.
MAX_WORDS = 32
MAX_SEMICOLONS = 1
# Patterns, without regard to case, and advice. At least nine of ten hits of a pattern must be real.
RULES = (
    # Words in place of fix, apply, show, next to.
    (r"\bmend(?:s|ed)?\b|\bheed(?:s|ed)?\b", "write fix, repair, apply"),
    (r"\btold to\b", "write receives, is configured to"),
    (r"\bbeside\b", "write next to, in addition to, compared with"),
    (r"\b(?:stands|stood)\b(?! for\b)", "write is, appears, replaces"),
    (
        r"(?<=\w )(?<!process )(?<!proxy )\bholds(?=\s*(?:[.,;:]|and\b|$))|\bwhat holds\b",
        "write applies, is in effect",
    ),
    (r"\blets? go\b|\bleft alone\b", "write removes, skips, does not use"),
    (r"\bby (?:itself|themselves)\b", "write automatically, on its own"),
    (r"\btroubles?\b", "write failure, error, problem"),
    (r"\bas (?:it|they) (?:came|comes?|arrives?)\b", "write unchanged"),
    (r"(?<!far )(?<!long )(?<!soon )\bas (?:it|they) (?:is|are|was|were)\b(?! \w+ed\b)", "write unchanged"),
    (r"\bwhoever\b", "name the actor: a client, a user"),
    (r"\blikewise\b", "repeat the noun"),
    (r"\banew\b", "write again"),
    (r"\bdearer\b", "write more expensive"),
    (r"\b(?:took|takes?|taken|taking)\b[^.;,:]{0,30}\bback\b", "write undo"),
    (r"\bunder way\b", "write in progress"),
    (r"\bof (?:yours|mine)\b", "write your …"),
    (r"[,;:] else\b", "write otherwise"),
    (r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|different\b|\w+er\b)", "write is not a"),
    (r"\bin spite of all\b|\bcomes? to nothing\b|\bwin nothing\b|\bno good\b", "say what happens"),
    # The proxy is not a person.
    (r"\b(?:we|our|ours|us)\b", "write the proxy, or you"),
    # Clauses in place of nouns, and pronouns without a noun.
    (
        r"(?<!^)\bwhat (?:is|are|was|were|has been|had been) (?!wrong\b|new\b)[^?]*$",
        "name it: the removed messages",
    ),
    (r"^What\b[^?]*\.$", "begin with a noun, not with a clause"),
    (r"^(?:Whose|Of which|By what|From when)\b[^?]*$", "write a whole phrase with its noun"),
    (r"(?<!each )(?<!all )(?<!some )(?<!none )(?<!one )\bof which\b", "make two sentences"),
    # One term for each thing.
    (
        r"\brounds\b|\b(?:an?|the|last|next|new(?:est)?|latest|no|each|every|any|this|one) round\b(?! \d)",
        "write compaction; round is its number",
    ),
)
# Quotations, by a part of the sentence.
ALLOWED = ("What is told of a round.",)

_PATTERNS = [(re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in RULES]
# Code, paths, and the name of a field before its description.
_CODE = re.compile(r"`[^`]*`|\b[\w.-]+/[\w./-]+\b|^[a-z_]+:(?= [A-Z`])")


def find_advice(sentence: str) -> Iterator[tuple[str, str]]:
    """Yields the words in a sentence that break a rule, and advice. Does not look into code."""
    plain = _CODE.sub("`x`", sentence)
    for pattern, advice in _PATTERNS:
        if found := pattern.search(plain):
            yield found[0].strip(), advice
    words = max(len(re.findall(r"[A-Za-z'`]+", part)) for part in plain.split(": "))
    if words > MAX_WORDS:
        yield f"{words} words", f"split it: {MAX_WORDS} words at most"
    if plain.count(";") > MAX_SEMICOLONS:
        yield ";", "make sentences of the parts"


def list_findings(texts: Iterable[UserText]) -> Iterator[str]:
    """Yields a line for each finding."""
    for sentence in (sentence for text in texts for sentence in split_sentences(text)):
        if not any(allowed in sentence.text for allowed in ALLOWED):
            for words, advice in find_advice(sentence.text):
                yield f"{sentence.path}:{sentence.line}: “{words}” in “{sentence.text}”: {advice}"


def read_texts(files: Iterable[Path]) -> list[UserText]:
    """Reads the texts of some files."""
    texts, chosen = list_texts(), [file.resolve() for file in files]
    known = {ROOT / text.path for text in texts}
    return [
        *(text for text in texts if ROOT / text.path in chosen),
        *(
            text
            for file in chosen
            if file not in known
            for text in list_markdown(str(file), file.read_text("utf-8"))
        ),
    ]


def main() -> int:
    """Exit code 1 if there is a finding."""
    files = [Path(each) for each in sys.argv[1:]]
    lines = list(list_findings(read_texts(files) if files else list_texts()))
    print("\n".join(lines) or "the texts follow the style")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

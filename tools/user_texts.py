"""Lists the texts that users meet, with file and line, for the style check and for readers.

Each text is a paragraph, a table cell, a comment, or a string of the code. Texts for models are not among
them, nor are the messages of providers that the demo repeats.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "proxy" / "compaction_proxy"

# Texts of these files are for models or for machines: prompts, replacements, regular expressions, SQL.
NOT_FOR_USERS = (
    "cli/demo/replies.py", "cli/demo/script.py", "cli/demo/validation.py", "compaction/auto_recall.py",
    "compaction/replacements.py", "compaction/summarizer.py", "core/ledger", "core/masking.py",
    "core/render.py", "core/repair.py", "core/sanitize.py", "core/search_tool.py", "core/strategies.py",
    "core/summary", "core/title_request.py", "recall/fulltext.py", "recall/stems.py", "recall/tokenize.py",
    "recall/tool.py", "replay/provider.py", "storage/redis/scripts.py", "storage/sqlite", "wires",
)  # fmt: skip
# Classes whose fields, and modules whose classes, are described to users by their docstrings.
FIELD_MODULES = ("config/sections.py",)
SCHEMA_MODULES = ("admin/api/schemas.py",)
MARKDOWN = ("*.md", "docs/**/*.md", "deploy/**/*.md", ".github/**/*.md")
COMMENTED = (
    "config.yaml", "docker-compose.yml", "deploy/**/*.y*ml", "deploy/**/*.conf", "deploy/**/*.service",
    "deploy/**/Caddyfile",
)  # fmt: skip
LABELLED = ("deploy/**/*.json", "deploy/**/*.y*ml", ".github/ISSUE_TEMPLATE/*.yml")

# The history, and the page that traces tests to the documents before the first version.
CONTRIBUTORS_PAGES = ("CHANGELOG.md", "docs/verification.md")

_FENCE = re.compile(r"^(\s*)(```|~~~).*?^\s*\2\s*$", re.DOTALL | re.MULTILINE)
_COMMENT_TAG = re.compile(r"<!--.*?-->|<(style|script|svg|pre)\b.*?</\1>", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*(?:\s+\"[^\"]*\")?\)")
_INLINE_TAG = re.compile(r"</?(?:a|b|code|em|i|kbd|small|span|strong|time)\b[^>]*>")
_TAG = re.compile(r"<[^>]+>")
_ATTRIBUTE = re.compile(r"""\b(?:title|aria-label|placeholder|alt)="([^"]*)\"""")
_PRINTED = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_STATEMENT = re.compile(r"\{[%#].*?[%#]\}", re.DOTALL)
_LABEL = re.compile(
    r"""^\s*-?\s*"?(?:title|description|summary|label|name|about)"?:\s+(?:"((?:[^"\\]|\\.)*)"|(\S.*?)),?\s*$"""
)
_IS_SETTING = re.compile(r"(?:- )?[\w.-]+:(?: [\[{\"].*)?$|--\w|\w+: \w+$")
_COMMENT = re.compile(r"^(\s*)#\s?(.*)$|^.*?\S\s+#\s(.*)$")
_LINE_START = re.compile(r"^\s*(?:[-*+]|\d+\.|>|#+)\s+")
# A string of fewer words is a word of an interface, not a text to judge.
LEAST_WORDS = 3

_CODE = re.compile(
    r"\(\?|\\b|\\d|=\"|^\s*[{<][\s\w]|: \{\w|\bimport \w|\bconst \w+ =|default-src|^[A-Z]+ (?:INTO|FROM)"
)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class UserText(NamedTuple):
    """A text that users meet. Its line breaks are those of the file, so that a place in it has a line."""

    path: str
    line: int
    text: str


def _list_blocks(path: str, text: str) -> Iterator[UserText]:
    """Yields the paragraphs, list items, headings and table cells of Markdown."""
    block: list[str] = []
    start = 1
    for number, line in enumerate([*text.split("\n"), ""], 1):
        is_row = line.lstrip().startswith("|")
        if block and (not line.strip() or is_row or _LINE_START.match(line)):
            yield UserText(path, start, "\n".join(block))
            block = []
        if is_row:
            yield from (UserText(path, number, cell.strip()) for cell in line.strip(" |").split(" | "))
        elif line.strip():
            start = start if block else number
            block.append(_LINE_START.sub("", line))


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def list_markdown(path: str, text: str) -> Iterator[UserText]:
    """Yields the texts of a page, without examples. The text of a link stays, its target does not."""
    text = _COMMENT_TAG.sub(_blank, _FENCE.sub(_blank, text))
    yield from _list_blocks(path, _TAG.sub("", _LINK.sub(r"\1", text)))


def list_template(path: str, text: str) -> Iterator[UserText]:
    """Yields the texts of an HTML template. A printed value becomes `{}`."""
    text = _STATEMENT.sub(_blank, _COMMENT_TAG.sub(_blank, text))
    text = _PRINTED.sub(lambda found: "{}" + _blank(found), text)
    for number, line in enumerate(text.split("\n"), 1):
        yield from (UserText(path, number, found) for found in _ATTRIBUTE.findall(line))
    plain = _TAG.sub(lambda found: "\0" + _blank(found) + "\0", _INLINE_TAG.sub("", text))
    start = 1
    for part in plain.split("\0"):
        stripped = part.strip()
        if stripped:
            yield UserText(path, start + part[: part.index(stripped[0])].count("\n"), stripped)
        start += part.count("\n")


def list_comments(path: str, text: str) -> Iterator[UserText]:
    """Yields the comments of a YAML file. Comments on lines that follow each other are one text."""
    block: list[str] = []
    start = 0
    for number, line in enumerate([*text.split("\n"), ""], 1):
        found = _COMMENT.match(line)
        is_own_line = found is not None and found[3] is None
        if block and not (is_own_line and found and found[2] and not found[2].startswith(" ")):
            yield UserText(path, start, "\n".join(block))
            block = []
        if found and is_own_line and found[2] and not _IS_SETTING.match(found[2].strip()):
            start = start if block else number
            block.append(found[2].strip())
        elif found and found[3]:
            yield UserText(path, number, found[3])


def list_labels(path: str, text: str) -> Iterator[UserText]:
    """Yields titles and descriptions in JSON and YAML: those of alerts, dashboards and forms."""
    for number, line in enumerate(text.split("\n"), 1):
        if found := _LABEL.match(line):
            yield UserText(path, number, found[1] or found[2] or "")


def _list_docstrings(path: str, tree: ast.Module) -> Iterator[ast.Constant]:
    """Yields docstrings that a command line, a configuration file or an OpenAPI document shows."""
    named = {
        call.args[0].id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | FunctionNode):
            continue
        statements = [each.value for each in node.body if isinstance(each, ast.Expr)]
        texts = [each for each in statements if isinstance(each, ast.Constant)]
        if isinstance(node, ast.ClassDef):
            first = 0 if path.endswith(SCHEMA_MODULES) else 1
            yield from texts[first:] if path.endswith((*FIELD_MODULES, *SCHEMA_MODULES)) else ()
        elif texts and ast.get_docstring(node):
            shown = [ast.unparse(each) for each in node.decorator_list]
            is_route = "/admin/api/" in path and any("router." in each for each in shown)
            is_command = "/cli/" in path and any(".command" in each for each in shown)
            is_added = path.endswith("cli/main.py") and not shown and not node.name.startswith("_")
            is_module_command = "/cli/" in path and path.endswith(f"/{node.name}.py")
            if is_route or is_command or is_added or is_module_command or node.name in named & {"connect"}:
                yield texts[0]


def _list_parts(tree: ast.Module) -> set[int]:
    """Lists, by `id`, the docstrings of a module and the pieces of its f-strings."""
    parts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | FunctionNode):
            parts.update(id(each.value) for each in node.body if isinstance(each, ast.Expr))
        elif isinstance(node, ast.JoinedStr):
            parts.update(id(each) for each in node.values)
    return parts


def list_strings(path: str, text: str) -> Iterator[UserText]:
    """Yields the strings of a Python module that have some words, and the docstrings that users see.

    A value in an f-string becomes `{}`.
    """
    tree = ast.parse(text)
    parts = _list_parts(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            value = "".join(
                str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            value = node.value
        else:
            continue
        if not _is_code(value) and len(value.split()) >= LEAST_WORDS:
            yield UserText(path, node.lineno, value)
    for each in _list_docstrings(path, tree):
        yield UserText(path, each.lineno, str(each.value))


def _is_code(value: str) -> bool:
    """Whether a string is an example in a programming language, a regular expression, or the like."""
    return _CODE.search(value) is not None


def list_texts() -> list[UserText]:
    """Lists all texts, by their files. A text that several files have appears once."""
    found: list[UserText] = []
    for patterns, lister in ((MARKDOWN, list_markdown), (COMMENTED, list_comments), (LABELLED, list_labels)):
        for path in _find_files(patterns):
            found += lister(str(path.relative_to(ROOT)), path.read_text("utf-8"))
    for path in sorted(PACKAGE.rglob("*.html")):
        found += list_template(str(path.relative_to(ROOT)), path.read_text("utf-8"))
    for path in sorted(PACKAGE.rglob("*.py")):
        if not str(path.relative_to(PACKAGE)).startswith(NOT_FOR_USERS):
            found += list_strings(str(path.relative_to(ROOT)), path.read_text("utf-8"))
    unique: dict[str, UserText] = {}
    for each in found:
        unique.setdefault(" ".join(each.text.split()), each)
    return [each for text, each in unique.items() if text]


def _find_files(patterns: tuple[str, ...]) -> list[Path]:
    found = {path.resolve() for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(found - {ROOT / name for name in CONTRIBUTORS_PAGES} - set(ROOT.glob("docs/adr/*")))


_SENTENCE_END = re.compile(
    r"(?<=[.!?])[)\"”]?\s+(?=[A-Z`{(\"“])|\n\s*\n|(?<=:)\n\s*[-*] |\n\s+(?=[a-z_]+: [A-Z`])"
)


def split_sentences(text: UserText) -> Iterator[UserText]:
    """Splits a text into sentences, each with its line."""
    start = 0
    for found in [*_SENTENCE_END.finditer(text.text), None]:
        stop = found.start() if found else len(text.text)
        sentence = text.text[start:stop]
        if sentence.strip():
            lead = len(sentence) - len(sentence.lstrip())
            line = text.line + text.text[: start + lead].count("\n")
            yield UserText(text.path, line, " ".join(sentence.split()))
        start = found.end() if found else stop

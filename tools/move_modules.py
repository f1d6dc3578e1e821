"""Moves modules of the package as a table says, and rewrites everything that names them.

The table has two columns, old path and new path, from the root of the repository. A row may name a folder
(both paths end with a slash). `-` as new path deletes a file that only exports names; `+` as old path makes a
package, with the docstring that the third column holds. Imports are rewritten by their syntax tree; strings,
comments and other texts by the module's dotted name, its path, and its path below the package.

    python tools/move_modules.py tools/moves.tsv
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OLD_ROOT, NEW_ROOT = "proxy/", "proxy/compaction_proxy/"
OLD_PACKAGE, NEW_PACKAGE = "proxy", "compaction_proxy"
# What keeps the old names: history, the lock, and what the table itself says.
UNTOUCHED = re.compile(
    r"^(CHANGELOG\.md|uv\.lock|tools/|tests/fixtures/|tests/vectors/|\.ci/goldens/|LICENSE)"
)
TEXTS = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".json", ".html", ".txt", ".tpl", ""}

_DOTTED = re.compile(r"(?<![\w./-])proxy((?:\.[a-z_][a-z_0-9]*)+)")
_PATH = re.compile(r"(?<![\w.-])(?<![\w.]/)proxy/([\w./*-]*)")
_SHORT_PATH = re.compile(r"(?<![\w./-])((?:[a-z_]+/)*[a-z_]+\.py)\b")
_SHORT_DOTTED = re.compile(r"`([a-z_]+\.[a-z_]+)((?:\.\w+)*)`")
_RUN = re.compile(r"(\"-m\",\s*)\"proxy\"|(-m )proxy\b(?!\.)")


class Edit(NamedTuple):
    """A piece of a text, by its places, and what replaces it."""

    start: int
    end: int
    text: str


def module_of(path: str, root: str, package: str) -> str:
    """Returns the dotted name of a module by its path."""
    parts = path.removeprefix(root).removesuffix(".py").split("/")
    return ".".join([package, *(part for part in parts if part and part != "__init__")])


@dataclass(frozen=True)
class Moves:
    """The table of moves.

    Attributes:
        files: New path of each module by its old one.
        folders: The same of folders.
        modules: New dotted name by the old one, of modules and of packages that move whole.
        exports: For packages that go, where each name that they exported is defined.
    """

    files: Mapping[str, str]
    folders: Mapping[str, str]
    modules: Mapping[str, str]
    exports: Mapping[str, Mapping[str, str]]

    def find_module(self, dotted: str) -> tuple[str, str] | None:
        """Returns the new name of the longest known beginning of a dotted name, and the rest."""
        parts = dotted.split(".")
        for count in range(len(parts), 1, -1):
            if new := self.modules.get(".".join(parts[:count])):
                return new, "".join(f".{part}" for part in parts[count:])
        return None

    def find_path(self, path: str) -> str | None:
        """Returns the new path of a file or folder; None for what does not exist."""
        if path in self.files:
            return self.files[path]
        for old, new in sorted(self.folders.items(), key=lambda pair: -len(pair[0])):
            if path.startswith(old):
                return new + path.removeprefix(old)
            if path == old.rstrip("/"):
                return new.rstrip("/")
        if path in {"proxy/", "proxy/**"} or (ROOT / path).exists():
            return NEW_ROOT + path.removeprefix(OLD_ROOT)
        return None


def read_rows(path: Path) -> list[list[str]]:
    """Returns the rows of a table, each with its columns."""
    return [line.split("\t") for line in path.read_text("utf-8").splitlines()]


def read_table(path: Path) -> Moves:
    """Returns the moves of a table."""
    rows = [tuple(row[:2]) for row in read_rows(path) if row[0] != "+"]
    files = {old: new for old, new in rows if not old.endswith("/") and new != "-"}
    folders = {old: new for old, new in rows if old.endswith("/")}
    modules = {
        module_of(old, OLD_ROOT, OLD_PACKAGE): module_of(new, NEW_ROOT, NEW_PACKAGE)
        for old, new in files.items()
        if old.startswith(OLD_ROOT) and new.startswith(NEW_ROOT) and old.endswith(".py")
    }
    for old, new in folders.items():
        modules.setdefault(
            module_of(old.rstrip("/"), OLD_ROOT, OLD_PACKAGE),
            module_of(new.rstrip("/"), NEW_ROOT, NEW_PACKAGE),
        )
    gone = [old for old, new in rows if new == "-" and old.endswith("__init__.py")]
    exports = {module_of(old, OLD_ROOT, OLD_PACKAGE): dict(read_exports(ROOT / old)) for old in gone}
    return Moves(files, folders, modules, exports)


def read_exports(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the names that a package exports, each with the module that defines it."""
    if path.exists():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((each.asname or each.name, node.module) for each in node.names)


def rewrite_text(text: str, moves: Moves) -> str:
    """Returns a text with the new names of modules and paths."""

    def dotted(found: re.Match[str]) -> str:
        new = moves.find_module(OLD_PACKAGE + found[1])
        return "".join(new) if new else found[0]

    def path(found: re.Match[str]) -> str:
        whole = "proxy/" + found[1]
        stem = whole.rstrip(".")
        new = moves.find_path(stem)
        return new + whole[len(stem) :] if new else found[0]

    def short_path(found: re.Match[str]) -> str:
        new = moves.files.get(OLD_ROOT + found[1]) if "/" in found[1] else None
        return new.removeprefix(NEW_ROOT) if new else found[0]

    def short_dotted(found: re.Match[str]) -> str:
        new = moves.modules.get(f"{OLD_PACKAGE}.{found[1]}")
        known = f"{OLD_ROOT}{found[1].replace('.', '/')}.py" in moves.files
        return f"`{new.removeprefix(NEW_PACKAGE + '.')}{found[2]}`" if new and known else found[0]

    text = _RUN.sub(lambda found: (found[1] and f'{found[1]}"{NEW_PACKAGE}"') or found[2] + NEW_PACKAGE, text)
    for pattern, rewrite in (
        (_DOTTED, dotted),
        (_PATH, path),
        (_SHORT_PATH, short_path),
        (_SHORT_DOTTED, short_dotted),
    ):
        text = pattern.sub(rewrite, text)
    return text


class _Source:
    """A module's text, with places by line and column."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = text.splitlines(keepends=True)

    def place(self, line: int, column: int) -> int:
        """Returns the place of a column that counts characters."""
        return self.starts[line - 1] + column

    def place_of_bytes(self, line: int, column: int) -> int:
        """Returns the place of a column that counts bytes, as in a syntax tree."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())


def find_names(tree: ast.AST, *, only_bound: bool = False) -> set[str]:
    """Returns the names that a module uses, or only those that it binds otherwise than by an import."""
    nodes = list(ast.walk(tree))
    read = {node.id for node in nodes if isinstance(node, ast.Name)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    bound |= {node.name for node in nodes if isinstance(node, defined)}
    imported = {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    return bound if only_bound else bound | read | imported


def rewrite_imports(text: str, moves: Moves) -> tuple[list[Edit], dict[str, str]]:
    """Returns the edits of a module's imports, and the names of modules that change in its code."""
    source, tree = _Source(text), ast.parse(text)
    edits: list[Edit] = []
    renames: dict[str, str] = {}
    taken, rebound = find_names(tree), find_names(tree, only_bound=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(each.name == OLD_PACKAGE for each in node.names):
            start, end = (
                source.place(node.lineno, node.col_offset),
                source.place(node.lineno, node.end_col_offset or 0),
            )
            edits.append(Edit(start, end, text[start:end].replace(OLD_PACKAGE, NEW_PACKAGE)))
            renames[OLD_PACKAGE] = NEW_PACKAGE
        if (
            not isinstance(node, ast.ImportFrom)
            or not node.module
            or node.module.split(".")[0] != OLD_PACKAGE
        ):
            continue
        groups: dict[str, list[str]] = {}
        for each in node.names:
            module, line = _import_of(node.module, each, moves, taken, rebound, renames)
            groups.setdefault(module, []).append(line)
        lines = [f"from {module} import {', '.join(names)}" for module, names in groups.items()]
        start = source.place(node.lineno, node.col_offset)
        end = source.place_of_bytes(node.end_lineno or node.lineno, node.end_col_offset or 0)
        tail = source.lines[(node.end_lineno or node.lineno) - 1][node.end_col_offset or 0 :].rstrip("\n")
        glue = f"{tail}\n{' ' * node.col_offset}"
        edits.append(Edit(start, end, glue.join(lines)))
    return edits, renames


def _import_of(
    module: str, each: ast.alias, moves: Moves, taken: set[str], rebound: set[str], renames: dict[str, str]
) -> tuple[str, str]:
    """Returns the module to import from, and what to import, `name` or `name as other`."""
    alias = f" as {each.asname}" if each.asname else ""
    if new := moves.modules.get(f"{module}.{each.name}"):
        package, _, stem = new.rpartition(".")
        if each.asname == stem:
            return package, stem
        if not alias and stem != each.name:
            if stem in taken or stem in renames.values() or each.name in rebound:
                alias = f" as {each.name}"
            else:
                renames[each.name] = stem
        return package, stem + alias
    origin = moves.exports.get(module, {}).get(each.name, module)
    found = moves.modules.get(origin)
    if found is None:
        raise SystemExit(f"no new place for {origin}, which defines {each.name}")
    return found, each.name + alias


def rewrite_module(text: str, moves: Moves) -> str:
    """Returns a module's text with new imports, and new names in its strings and comments."""
    edits, renames = rewrite_imports(text, moves)
    source = _Source(text)
    if renames:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Name) and node.id in renames:
                start = source.place_of_bytes(node.lineno, node.col_offset)
                edits.append(Edit(start, start + len(node.id), renames[node.id]))
    spans = [(edit.start, edit.end) for edit in edits]
    kinds = {tokenize.STRING, tokenize.COMMENT}
    kinds |= {getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        start, end = source.place(*token.start), source.place(*token.end)
        if token.type in kinds and not any(first <= start < last for first, last in spans):
            new = rewrite_text(text[start:end], moves)
            if new != text[start:end]:
                edits.append(Edit(start, end, new))
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return _RUN.sub(lambda found: found[0].replace('"proxy"', f'"{NEW_PACKAGE}"'), text)


def list_texts() -> list[str]:
    """Returns the tracked texts that may name modules."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [
        path
        for path in listed.splitlines()
        if not UNTOUCHED.match(path) and Path(path).suffix in TEXTS and (ROOT / path).is_file()
    ]


def is_python(path: str, text: str) -> bool:
    """Whether a file is a Python module or script."""
    return path.endswith(".py") or text.startswith("#!/usr/bin/env python")


def move(table: Path) -> None:
    """Rewrites all texts, then moves the files."""
    moves = read_table(table)
    for path in list_texts():
        text = (ROOT / path).read_text("utf-8")
        new = rewrite_module(text, moves) if is_python(path, text) else rewrite_text(text, moves)
        if new != text:
            (ROOT / path).write_text(new, "utf-8")
    # By way of other names: a new path may be the old one of another module, or a folder where a module was.
    pairs = [(f"{old}.moving", new) for old, new in moves.files.items()]
    for old in moves.files:
        git("mv", old, f"{old}.moving")
    for temporary, new in pairs + [pair for old in moves.folders for pair in list_moves(old, moves)]:
        (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
        git("mv", temporary, new)
    for old, new, *docstring in read_rows(table):
        if new == "-":
            git("rm", "--quiet", "--force", old)
        elif old == "+":
            (ROOT / new).write_text(f'"""{docstring[0]}"""\n', "utf-8")
            git("add", new)


def list_moves(folder: str, moves: Moves) -> list[tuple[str, str]]:
    """Returns the moves of the tracked files of a folder that no other row names."""
    names = git("ls-files", folder).splitlines()
    return [
        (name, new)
        for name in names
        if not name.endswith(".moving")
        and (new := moves.find_path(name))
        and folder == find_folder(name, moves)
    ]


def find_folder(name: str, moves: Moves) -> str:
    """Returns the longest folder of the table that holds a file."""
    return max((each for each in moves.folders if name.startswith(each)), key=len)


def git(*arguments: str) -> str:
    """Runs git at the root and returns what it prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def main() -> None:
    """Moves what the table says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    move(parser.parse_args().table)


if __name__ == "__main__":
    main()

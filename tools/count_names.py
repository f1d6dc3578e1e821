"""Counts names that say too little: one-word functions, classes that stand twice, the worst names of a list.

    python tools/count_names.py [COMMIT]

Without a commit it counts the checkout. A name of a function counts as one word if it has no underscore
inside, or begins with a verb that says nothing (`do_`, `handle_`, `process_`, `perform_`). The worst names
stand in `tools/naming/worst.tsv`; one still stands if a class, function, field,
constant or parameter has it, or only if a function has it where `()` follows in the list.
"""

import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILLERS = frozenset({"do", "handle", "process", "perform"})


def read_sources(commit: str) -> dict[str, str]:
    """Sources of the package by their path below its folder; of the checkout if there is no commit."""
    folders = ("proxy/compaction_proxy/", "proxy/")
    if commit:
        command = ["git", "-C", str(ROOT), "archive", commit, "proxy"]
        with tarfile.open(fileobj=io.BytesIO(subprocess.check_output(command))) as archive:
            files = {
                each.name: handle.read().decode()
                for each in archive
                if each.name.endswith(".py") and (handle := archive.extractfile(each))
            }
    else:
        files = {str(each.relative_to(ROOT)): each.read_text() for each in (ROOT / "proxy").rglob("*.py")}
    start = next(folder for folder in folders if any(name.startswith(folder) for name in files))
    return {name.removeprefix(start): text for name, text in files.items()}


def is_one_word(name: str) -> bool:
    """Whether a function's name has one word that says something, or none."""
    plain = name.strip("_")
    return "_" not in plain or plain.split("_")[0] in FILLERS


def list_names(tree: ast.AST) -> Iterator[str]:
    """Names of classes, functions, parameters, and of what a module or a class assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            if not isinstance(node, ast.ClassDef):
                yield f"{node.name}()"
        elif isinstance(node, ast.arg):
            yield node.arg
        if isinstance(node, ast.Module | ast.ClassDef):
            for each in node.body:
                targets = (
                    each.targets
                    if isinstance(each, ast.Assign)
                    else [each.target]
                    if isinstance(each, ast.AnnAssign)
                    else []
                )
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def find_worst(names: Mapping[str, set[str]], column: int) -> list[str]:
    """Names of the list that still stand. `names` are those of each module."""
    rows = [
        line.split("\t")
        for line in (ROOT / "tools/naming/worst.tsv").read_text().splitlines()
        if not line.startswith("#")
    ]
    return [
        row[0]
        for row in rows
        if any(row[0] in found and path.startswith(row[column]) for path, found in names.items())
    ]


def main(arguments: list[str]) -> None:
    """Print the counts."""
    sources = {path: ast.parse(text) for path, text in read_sources("".join(arguments)).items()}
    functions: list[str] = []
    classes: Counter[str] = Counter()
    names: defaultdict[str, set[str]] = defaultdict(set)
    for path, tree in sources.items():
        names[path].update(list_names(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += not node.name.startswith("_")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
                functions.append(node.name)
    short = sum(map(is_one_word, functions))
    twice = sorted(name for name, count in classes.items() if count > 1)
    worst = find_worst(names, 2 if any(path.startswith("relay/") for path in sources) else 3)
    print(f"functions with one-word names: {short} of {len(functions)} = {short / len(functions):.1%}")
    print(f"public class names that stand twice: {len(twice)} {' '.join(twice)}")
    print(f"worst names that still stand: {len(worst)} {' '.join(worst)}")


if __name__ == "__main__":
    main(sys.argv[1:])

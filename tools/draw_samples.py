"""Draws functions or texts by a seed, for readers who have never seen the code.

    python tools/draw_samples.py signatures [--seed 21] [--number 60] [--commit COMMIT]
    python tools/draw_samples.py prose [--seed 21] [--number 40] [--commit COMMIT]
    python tools/draw_samples.py texts [--seed 21] [--number 40]

`signatures` prints functions without bodies and docstrings, below the name of their class. The draw goes
by the order of functions in files, so two commits that differ only in names give the same functions.
`prose` prints docstrings and comments, each with the code that follows it. `texts` prints sentences that
users meet (`user_texts.py`), in the documentation, commands, pages and messages of this checkout.
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator, Mapping

from count_names import ROOT, read_sources
from user_texts import UserText, list_texts, split_sentences

# A text for users is drawn only if it has this many words, so that it can be understood or not.
LEAST_WORDS = 4
# Characters that are shown of the line where a text for users begins.
MAX_SHOWN = 400
# Lines of code that are shown below a docstring or a comment.
SHOWN_LINES = 25

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def list_functions(sources: Mapping[str, str]) -> Iterator[tuple[str, str, FunctionNode]]:
    """Yields path, class (empty outside of one) and node of each function that is not a dunder method."""
    for path, text in sorted(sources.items()):
        yield from _walk(path, "", ast.parse(text))


def _walk(path: str, owner: str, node: ast.AST) -> Iterator[tuple[str, str, FunctionNode]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode) and not child.name.startswith("__"):
            yield path, owner, child
        inner = child.name if isinstance(child, ast.ClassDef) else owner
        yield from _walk(path, inner, child)


def format_signature(owner: str, function: FunctionNode) -> str:
    """Returns a signature as Python writes it, with decorators, below its class."""
    decorators = [f"@{ast.unparse(each)}" for each in function.decorator_list]
    word = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    line = f"{word} {function.name}({ast.unparse(function.args)}){returns}: ..."
    lines = [*decorators, line]
    return "\n".join([f"class {owner}:", *(f"    {each}" for each in lines)] if owner else lines)


def list_prose(sources: Mapping[str, str]) -> Iterator[tuple[str, int, str]]:
    """Yields path, line and text of each docstring and each comment that stands on lines of its own."""
    for path, text in sorted(sources.items()):
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | FunctionNode) and ast.get_docstring(node):
                start = 1 if isinstance(node, ast.Module) else node.lineno
                end = (node.body[0].end_lineno or start) + SHOWN_LINES
                stop = min(end, getattr(node, "end_lineno", end))
                yield path, start, "\n".join(lines[start - 1 : stop])
        last = -1
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            number = token.start[0]
            if token.type == tokenize.COMMENT and lines[number - 1].strip().startswith("#"):
                if number != last + 1:
                    yield path, number, "\n".join(lines[number - 1 : number + SHOWN_LINES // 2])
                last = number


def list_sentences() -> list[UserText]:
    """Lists the sentences that users meet, without those that are code or a few words."""
    found: dict[str, UserText] = {}
    for text in list_texts():
        for sentence in split_sentences(text):
            words = re.findall(r"[A-Za-z]{2,}", re.sub(r"`[^`]*`", "", sentence.text))
            if len(words) >= LEAST_WORDS:
                found.setdefault(sentence.text, sentence)
    return list(found.values())


def main() -> None:
    """Print the samples."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["signatures", "prose", "texts"])
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--number", type=int)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    print(f"seed {options.seed}")
    if options.kind == "texts":
        for count, drawn in enumerate(rng.sample(list_sentences(), options.number or 40), 1):
            shown = (ROOT / drawn.path).read_text("utf-8").splitlines()[drawn.line - 1].strip()
            print(f"\n{count}. {drawn.path}:{drawn.line}\n{drawn.text}\n    > {shown[:MAX_SHOWN]}")
        return
    sources = read_sources(options.commit)
    if options.kind == "signatures":
        functions = rng.sample(list(list_functions(sources)), options.number or 60)
        for count, (_, owner, function) in enumerate(functions, 1):
            print(f"\n{count}.\n{format_signature(owner, function)}")
    else:
        for count, (path, line, text) in enumerate(
            rng.sample(list(list_prose(sources)), options.number or 40), 1
        ):
            print(f"\n=== {count}. {path}:{line}\n{text}")


if __name__ == "__main__":
    main()

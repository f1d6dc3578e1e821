"""Draws small faults by a seed, puts each into a copy of the sources, and runs the tests.

    python tools/mutate.py [--seed 23] [--number 100] [--packages core compaction …] [--resume FILE]

A mutant changes one comparison, one operator of arithmetic or logic, one number, one condition, or one
returned value. First the mirrored test of its module runs, then the tests of its package, then `make test`,
then `make test-system`, until one fails: the mutant is killed. Mutants that survive are printed with their
line. With `--resume`, results are kept in FILE, and mutants that are in FILE are left out.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("proxy/compaction_proxy")
PACKAGES = ("core", "compaction", "gateway", "storage")
TIMEOUT_S = 1_800
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+"}


@dataclass(frozen=True)
class Mutant:
    """A fault: the text that replaces the characters from `start` to `stop` of a file.

    Attributes:
        path: The file, relative to the root of the repository.
        line: The line of the fault.
        start: Offset of the replaced text, in characters.
        stop: Offset of the end of the replaced text.
        before: The replaced text.
        after: The text in its place.
    """

    path: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    def apply(self, text: str) -> str:
        """Returns the source with the fault."""
        return text[: self.start] + self.after + text[self.stop :]

    def describe(self) -> str:
        """Returns the place and the change in one line."""
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


def _mutate_node(node: ast.AST, segment: str) -> str | None:  # noqa: C901, PLR0911 - a table of cases
    """Returns the source of an expression or statement with a fault; None if it has no place for one."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            left, right = (ast.unparse(each) for each in (node.left, node.comparators[0]))
            return f"({left} {COMPARISONS[type(operator)]} {right})"
        case ast.BoolOp():
            word = " or " if isinstance(node.op, ast.And) else " and "
            return f"({word.join(f'({ast.unparse(each)})' for each in node.values)})"
        case ast.BinOp() if type(node.op) in ARITHMETIC and not isinstance(node.left, ast.Constant):
            return f"({ast.unparse(node.left)} {ARITHMETIC[type(node.op)]} {ast.unparse(node.right)})"
        case ast.UnaryOp(op=ast.Not()):
            return f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value)) if not segment.startswith(("'", '"')):
            return str(value + 1)
        case ast.IfExp():
            return f"({ast.unparse(node.orelse)} if {ast.unparse(node.test)} else {ast.unparse(node.body)})"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            return "return None"
        case _:
            return None


def list_mutants(path: Path) -> Iterator[Mutant]:
    """Yields all faults that can be put into the functions of a file, in order."""
    text = path.read_text("utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()
    tree = ast.parse(text)
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    seen = set[tuple[int, int]]()
    # Up to Python 3.11, expressions inside f-strings have no true positions.
    formatted = {
        id(inner) for each in ast.walk(tree) if isinstance(each, ast.JoinedStr) for inner in ast.walk(each)
    }
    for function in functions:
        for node in (each for statement in function.body for each in ast.walk(statement)):
            if (
                not isinstance(node, ast.expr | ast.Return)
                or node.end_lineno is None
                or id(node) in formatted
            ):
                continue
            start = len(raw[: starts[node.lineno - 1] + node.col_offset].decode())
            stop = len(raw[: starts[node.end_lineno - 1] + (node.end_col_offset or 0)].decode())
            after = _mutate_node(node, text[start:stop])
            if after is not None and (start, stop) not in seen:
                seen.add((start, stop))
                yield Mutant(str(path.relative_to(ROOT)), node.lineno, start, stop, text[start:stop], after)


def draw_mutants(seed: int, number: int, packages: Sequence[str]) -> list[Mutant]:
    """Draws faults, each place with the same probability."""
    paths = sorted(path for each in packages for path in (ROOT / PACKAGE / each).rglob("*.py"))
    mutants = [mutant for path in paths for mutant in list_mutants(path)]
    return random.Random(seed).sample(mutants, min(number, len(mutants)))


def list_stages(path: str) -> Iterator[list[str]]:
    """Yields the arguments of pytest for each stage, the quickest tests first."""
    inner = Path(path).relative_to(PACKAGE)
    mirrored = Path("tests") / inner.parent / f"test_{inner.stem}.py"
    if (ROOT / mirrored).exists():
        yield [str(mirrored), "-n", "0"]
    else:
        yield [str(mirrored.parent)]
    yield [str(Path("tests") / inner.parts[0])]
    yield ["tests", "--ignore=tests/system", "--ignore=tests/bench"]
    yield ["tests/system", "tests/bench"]


def find_killer(mutant: Mutant, copy: Path, processes: str, stages: int) -> str:
    """Returns the stage whose tests notice the fault; empty if none does.

    Args:
        mutant: The fault.
        copy: A copy of the repository.
        processes: Number of processes of pytest.
        stages: Number of stages that are tried.
    """
    file = copy / mutant.path
    original = file.read_text("utf-8")
    file.write_text(mutant.apply(original), "utf-8")
    environ = {**os.environ, "PYTHONPATH": str(copy / "proxy"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--dist", "loadfile"]
    try:
        for stage in islice(list_stages(mutant.path), stages):
            run = [*command, "-n", processes, *stage]
            try:
                done = subprocess.run(
                    run, cwd=copy, env=environ, capture_output=True, timeout=TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired:
                return stage[0]
            # A test failed, or the module cannot be imported, be it by a test or by a conftest.
            if done.returncode in {1, 2, 3} or b"while loading conftest" in done.stderr:
                return stage[0]
        return ""
    finally:
        file.write_text(original, "utf-8")


def main() -> None:
    """Draws mutants, tries each, and prints who survives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    parser.add_argument("--processes", default="3", help="of pytest")
    parser.add_argument(
        "--stages", type=int, default=4, help="2: only the tests of the module and the package"
    )
    parser.add_argument("--resume", type=Path, metavar="FILE")
    options = parser.parse_args()
    drawn = draw_mutants(options.seed, options.number, options.packages)
    known: dict[str, str] = {}
    if options.resume and options.resume.exists():
        lines = map(json.loads, options.resume.read_text("utf-8").splitlines())
        known = {Mutant(**line["mutant"]).describe(): line["killer"] for line in lines}
    print(f"seed {options.seed}, {len(drawn)} mutants", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".venv", "__pycache__", ".git", ".mypy_cache")
        )
        for mutant in drawn:
            name = mutant.describe()
            if name not in known:
                known[name] = find_killer(mutant, copy, options.processes, options.stages)
                if options.resume:
                    with options.resume.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps({"mutant": asdict(mutant), "killer": known[name]}) + "\n")
            print(f"{'killed by ' + known[name] if known[name] else 'SURVIVED'}: {name}", flush=True)
    killed = sum(bool(known[mutant.describe()]) for mutant in drawn)
    print(f"{killed} of {len(drawn)} killed")


if __name__ == "__main__":
    main()

"""The shape of the source: who may import whom, and what never appears.

Directions are those of the architecture: arrows point down, the core imports nothing but the standard
library, itself and our errors, and a third-party library is known to the module that owns it.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "proxy"
MODULES = sorted(PACKAGE.rglob("*.py"))

BROAD = {"Exception", "BaseException"}

# A part may import the parts of a lower number, and itself; modules of the package's root that are named
# nowhere here are use cases.
LAYERS = {
    "__main__": 6, "cli": 5, "app": 4, "endpoints": 4, "parts": 4, "installation": 4, "serving": 4, "demo": 4,
    "relay": 3, "admin": 3,
    "use case": 2, "mcp": 2,
    "adapters": 1,
    "dialects": 1, "ports": 1,
    "core": 0, "config": 0, "errors": 0, "logs": 0, "log_events": 0, "guard": 0, "": 0,
}  # fmt: skip
# Where a lower number is not enough, or too much: exactly these.
EXACTLY = {
    "core": {"errors"},  # what it raises; errors is pure and imports nothing
    "errors": set(),
    "guard": set(),
    "logs": set(),
    "log_events": set(),
    "": set(),
    "config": {"core", "errors"},  # strategies are core's rows; their fields are checked against them
    "serving": {"errors", "guard", "logs", "log_events"},
    "ports": {"core", "errors"},
    "dialects": {"core", "ports", "errors"},
    "adapters": {"adapters", "ports", "core", "dialects", "errors", "guard", "logs", "log_events"},
}
# Parts of one layer that may import one another.
ALSO = {
    "demo": {"serving", "app"},
    "app": {"endpoints", "parts", "installation"},
    "endpoints": {"parts"},
    "parts": {"installation"},
    "mcp": {"use case"},  # tools over them
}
# Everyone else reaches an adapter through a port.
KNOW_ADAPTERS = {"app", "endpoints", "parts", "installation", "demo", "cli", "adapters"}

# Which parts or modules may import a library.
OWNERS = {
    "aiohttp": {"adapters"},
    "backports": {"dialects"},
    "blake3": {"dialects"},
    "brotli": {"dialects"},
    "compression": {"dialects"},  # of the standard library from Python 3.14 on
    "fastapi": {"admin", "app", "relay"},
    "httptools": {"adapters", "serving"},
    "mcp": {"mcp"},
    "mcp_types": {"mcp"},
    "starlette": {"admin", "relay", "demo", "app", "endpoints", "serving", "mcp"},
    "genai_prices": {"adapters"},
    "jinja2": {"admin"},
    "opentelemetry": {"adapters"},
    "prometheus_client": {"adapters"},
    "httpx": {"adapters", "relay", "demo", "app"},
    "msgspec": {"dialects", "adapters", "records", "demo"},
    "pydantic": {"config", "demo"},  # demo: secrets of a configuration it makes
    "pydantic_core": {"config"},
    "structlog": {"logs", "relay", "adapters", "use case", "parts", "installation", "admin", "serving"},
    "tiktoken": {"adapters"},
    "typer": {"cli"},
    "uvicorn": {"serving"},
    "yaml": {"config"},
    "yarl": {"adapters"},  # aiohttp's URLs
    "cryptography": {"adapters"},
    "redis": {"adapters"},
}
ONE_MODULE = {"aiohttp", "genai_prices", "tiktoken"}


def name_of(path: Path) -> str:
    """A module's name below the package, such as `core.budget`; empty for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def part_of(module: str) -> str:
    """The part of the architecture that a module belongs to."""
    first = module.partition(".")[0]
    return first if first in LAYERS else "use case"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """Dotted names that a module imports, wherever in the module."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path: Path) -> set[str]:
    """Parts of our own that a module imports."""
    names = (name for name in imported(path) if name.split(".")[0] == "proxy")
    return {part_of(name.removeprefix("proxy").lstrip(".")) for name in names}


def allowed(part: str) -> set[str]:
    """Parts that a part may import."""
    if part in EXACTLY:
        return EXACTLY[part] | {part}
    lower = {other for other, layer in LAYERS.items() if layer < LAYERS[part]}
    hidden = set() if part in KNOW_ADAPTERS else {"adapters"}
    return (lower - hidden) | {part} | ALSO.get(part, set())


def libraries(path: Path) -> set[str]:
    """Third-party packages that a module imports."""
    return {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names - {"proxy"}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def caught(node: ast.ExceptHandler) -> set[str]:
    """Names of what an except clause catches; a bare one catches BaseException."""
    if node.type is None:
        return {"BaseException"}
    members = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return {ast.unparse(member).rpartition(".")[2] for member in members}


@cache
def own_classes() -> frozenset[str]:
    """Names of all classes of the package."""
    return frozenset(
        node.name for path in MODULES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)
    )


every_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: name_of(path) or "proxy")


@every_module
def test_imports_point_down(path: Path) -> None:
    part = part_of(name_of(path))
    assert ours(path) - allowed(part) == set(), f"{part} may not import these"


@every_module
def test_a_library_is_imported_by_its_owner(path: Path) -> None:
    module = name_of(path)
    places = {part_of(module), module}
    assert {library for library in libraries(path) if not OWNERS.get(library, set()) & places} == set()


@pytest.mark.parametrize("library", sorted(ONE_MODULE))
def test_some_libraries_are_known_to_one_module(library: str) -> None:
    assert len([name_of(path) for path in MODULES if library in libraries(path)]) <= 1


def test_an_adapter_knows_one_library_besides_its_types() -> None:
    shared = {"httpx", "msgspec", "structlog", "yarl"}
    found = {
        name_of(path): libraries(path) - shared for path in MODULES if part_of(name_of(path)) == "adapters"
    }
    assert {name: known for name, known in found.items() if len(known) > 1} == {}


@every_module
def test_a_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(tree(path)), "the docstring is missing"


def test_nobody_catches_broadly_but_by_the_guard() -> None:
    found = [
        name_of(path)
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and caught(node) & BROAD
    ]
    assert found == []


@every_module
def test_nothing_is_rebound_globally(path: Path) -> None:
    assert [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Global)] == []


@every_module
def test_only_commands_import_inside_functions(path: Path) -> None:
    inner = {
        node.name
        for node in functions(path)
        for line in ast.walk(node)
        if isinstance(line, ast.Import | ast.ImportFrom)
    }
    assert part_of(name_of(path)) == "cli" or inner == set()


@every_module
def test_our_own_classes_do_not_inherit_from_one_another(path: Path) -> None:
    inherited = {
        f"{node.name}({ast.unparse(base)})"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if ast.unparse(base) in own_classes() and not ast.unparse(base).endswith("Error")
    }
    assert name_of(path) == "errors" or inherited == set()

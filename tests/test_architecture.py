"""The layers of the package, the owners of libraries, what appears nowhere in it, and where its tests are.

Every package and module is listed in `LAYERS`; each imports only what stands below it. A third-party library
is known to the modules that own it.
"""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from tests.helpers.source import parse_source

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "proxy"
NAME = "compaction_proxy"
PACKAGE = SOURCE / NAME

# From top to bottom: packages, and modules that stand beside them.
LAYERS = (
    "__main__", "cli", "app", "runtime", "admin", "gateway", "replay", "compaction", "recall", "telemetry",
    "providers", "storage", "wires", "config", "core", "support", "__init__",
)  # fmt: skip
# The core is pure: of what stands below it, it takes only these modules.
PURE = {"support.net", "support.formatting", "support.log_events"}

BROAD = {"Exception", "BaseException"}

# The packages or modules that may import a library.
OWNERS = {
    "backports": {"wires.content_coding"},
    "blake3": {"wires.incremental_reader"},
    "brotli": {"wires.content_coding"},
    "compression": {"wires.content_coding"},  # of the standard library from Python 3.14 on
    "cryptography": {"gateway.compaction_cipher", "storage.encrypted"},
    "fastapi": {"admin", "app", "gateway.routes"},
    "httptools": {"gateway.client.parser", "gateway.server.parser"},
    "httpx": {"cli", "gateway", "providers"},
    "jinja2": {"admin.ui.templates"},
    "mcp": {"gateway.mcp"},
    "mcp_types": {"gateway.mcp"},
    "msgspec": {"wires"},
    "opentelemetry": {"telemetry.otel"},
    "prometheus_client": {"telemetry.metrics"},
    "pydantic": {"config", "cli.demo"},  # the demo makes a configuration with secrets
    "pydantic_core": {"config"},
    "redis": {"storage.redis"},
    "rich": {"cli.console"},
    "starlette": {"admin", "app", "gateway"},
    "structlog": {"compaction", "gateway", "providers", "runtime", "telemetry"},
    "tiktoken": {"providers.tokenizers"},
    "typer": {"cli"},
    "uvicorn": {"gateway.server"},
    "yaml": {"config.yaml_file"},
}

TESTS = ROOT / "tests"
# Modules that need no test at the mirrored path, each with the reason.
UNTESTED = {
    "core.summary.call": "records that do nothing: what is made of them is tested by wire",
    "gateway.client.types": "a record and protocols: tests/gateway/client runs them on each engine",
    "providers.types": "protocols",
    "support.log_events": "constants: tests/docs/test_strategies.py compares them with the pages",
}
MAX_UNTESTED_SHARE = 0.05


A_TEST = "async def test_it():\n    pass\n"


def list_modules(package: Path) -> list[Path]:
    """Returns the paths of all modules of a package."""
    return sorted(package.rglob("*.py"))


def name_of(path: Path, package: Path = PACKAGE) -> str:
    """Returns a module's name below the package, such as `core.budget`."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "__init__"


def list_imports(path: Path) -> Iterator[str]:
    """Yields the dotted names that a module imports, wherever in the module."""
    for node in ast.walk(parse_source(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def find_upward_imports(package: Path) -> list[str]:
    """Returns the imports of a package that do not point down, and the modules that have no layer."""
    found = []
    for path in list_modules(package):
        name = name_of(path, package)
        layer = name.partition(".")[0]
        if layer not in LAYERS:
            found.append(f"{name} has no layer")
            continue
        for imported in list_imports(path):
            top, _, below = imported.partition(".")
            other = below.partition(".")[0]
            if top != NAME or other == layer:
                continue
            if other not in LAYERS:
                other = "__init__"  # a name of the package itself, such as its version
            impure = layer == "core" and other == "support" and ".".join(below.split(".")[:2]) not in PURE
            if impure or LAYERS.index(other) < LAYERS.index(layer):
                found.append(f"{name} imports {below}")
    return found


def has_code(path: Path) -> bool:
    """Returns whether a module does more than to start the program or to hand on names of other modules."""
    if path.stem == "__main__":
        return False
    if path.stem != "__init__":
        return True
    return not all(
        isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in {"__all__", "__version__"})
        for node in parse_source(path).body
    )


def holds_test(path: Path) -> bool:
    """Returns whether a file is there and defines a test."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return path.is_file() and any(
        isinstance(node, functions) and node.name.startswith("test_") for node in ast.walk(parse_source(path))
    )


def find_untested(package: Path, tests: Path, untested: Collection[str]) -> list[str]:
    """Returns the modules without a test file at the mirrored path, and the exceptions that are none.

    The test of `core/budget.py` is `core/test_budget.py`; that of `core/__init__.py` is `test_core.py`.
    """
    found, known = [], set()
    for path in filter(has_code, list_modules(package)):
        name = name_of(path, package)
        known.add(name)
        folder, _, stem = name.rpartition(".")
        test = Path(*folder.split("."), f"test_{stem}.py")
        if holds_test(tests / test):
            found += [f"{name} is an exception, but has a test"] if name in untested else []
        elif name not in untested:
            found.append(f"{name} has no test at {test.as_posix()}")
    found += [f"{name} is an exception, but no module with code" for name in untested if name not in known]
    if len(untested) > MAX_UNTESTED_SHARE * len(known):
        found.append("too many modules are exceptions")
    return found


def list_libraries(path: Path) -> set[str]:
    """Returns the third-party packages that a module imports."""
    return {name.split(".")[0] for name in list_imports(path)} - sys.stdlib_module_names - {NAME}


def list_caught(node: ast.ExceptHandler) -> set[str]:
    """Returns the names of what an except clause catches; a bare one catches BaseException."""
    if node.type is None:
        return {"BaseException"}
    members = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return {ast.unparse(member).rpartition(".")[2] for member in members}


@cache
def list_classes() -> frozenset[str]:
    """Returns the names of all classes of the package."""
    return frozenset(
        node.name
        for path in list_modules(PACKAGE)
        for node in ast.walk(parse_source(path))
        if isinstance(node, ast.ClassDef)
    )


every_module = pytest.mark.parametrize("path", list_modules(PACKAGE), ids=name_of)


def write(package: Path, name: str, text: str) -> None:
    path = package / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_imports_point_down() -> None:
    assert find_upward_imports(PACKAGE) == []


@pytest.mark.parametrize(("upper", "lower"), [*combinations(LAYERS[1:-1], 2)])
def test_an_import_that_points_up_is_found_in_every_layer(tmp_path: Path, upper: str, lower: str) -> None:
    write(tmp_path, f"{upper}.one", f"from {NAME}.support.net import split")
    write(tmp_path, f"{lower}.other", f"from {NAME}.{upper}.one import x\n")

    assert f"{lower}.other imports {upper}.one.x" in find_upward_imports(tmp_path)


def test_an_import_inside_a_function_and_a_package_without_a_layer_are_found(tmp_path: Path) -> None:
    write(tmp_path, "config.one", f"def f():\n    import {NAME}.cli.main\n")
    write(tmp_path, "helpers.some", "")
    write(tmp_path, "loose", "")

    found = find_upward_imports(tmp_path)

    assert found == ["config.one imports cli.main", "helpers.some has no layer", "loose has no layer"]


def test_the_core_takes_only_pure_modules_of_support(tmp_path: Path) -> None:
    write(tmp_path, "core.one", f"from {NAME}.support.offload import beside\n")
    write(tmp_path, "core.two", f"from {NAME}.support.net import split\n")

    assert find_upward_imports(tmp_path) == ["core.one imports support.offload.beside"]


@every_module
def test_a_module_can_be_imported(path: Path) -> None:
    name = name_of(path)
    if name != "__main__":
        importlib.import_module(NAME if name == "__init__" else f"{NAME}.{name}")


def test_nothing_imports_the_old_package_and_it_cannot_be_imported(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]

    importing = re.compile(r"^ *(?:from|import) proxy\b", re.MULTILINE)

    assert [path for path in paths if importing.search(path.read_text("utf-8"))] == []
    assert [path.name for path in SOURCE.iterdir() if path.suffix == ".py"] == []
    done = subprocess.run(
        [sys.executable, "-c", "import proxy"], cwd=tmp_path, capture_output=True, check=False
    )
    assert b"ModuleNotFoundError: No module named 'proxy'" in done.stderr


@every_module
def test_a_library_is_imported_by_its_owner(path: Path) -> None:
    name = name_of(path)
    parts = name.split(".")
    places = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    assert {library for library in list_libraries(path) if not OWNERS.get(library, set()) & places} == set()


@every_module
def test_a_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(parse_source(path)), "the docstring is missing"


def test_nobody_catches_broadly_but_by_the_one_that_may() -> None:
    found = [
        name_of(path)
        for path in list_modules(PACKAGE)
        for node in ast.walk(parse_source(path))
        if isinstance(node, ast.ExceptHandler) and list_caught(node) & BROAD
    ]
    assert found == []


@every_module
def test_nothing_is_rebound_globally(path: Path) -> None:
    assert [node.lineno for node in ast.walk(parse_source(path)) if isinstance(node, ast.Global)] == []


# Functions that import, so that a proxy whose admin site nobody opens does not load it.
LAZY_IMPORTS = {"app": frozenset({"_create_admin_site", "_build_admin_api"})}


@every_module
def test_only_commands_and_the_lazy_admin_site_import_inside_functions(path: Path) -> None:
    inner = {
        node.name
        for node in ast.walk(parse_source(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in ast.walk(node)
        if isinstance(line, ast.Import | ast.ImportFrom)
    }
    assert name_of(path).startswith("cli.") or inner <= LAZY_IMPORTS.get(name_of(path), frozenset())


@every_module
def test_our_own_classes_do_not_inherit_from_one_another(path: Path) -> None:
    inherited = {
        f"{node.name}({ast.unparse(base)})"
        for node in ast.walk(parse_source(path))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if ast.unparse(base) in list_classes() and not ast.unparse(base).endswith("Error")
    }
    assert name_of(path) == "core.errors" or inherited == set()


def test_every_module_has_its_test_at_the_mirrored_path() -> None:
    assert find_untested(PACKAGE, TESTS, UNTESTED) == []
    assert all(UNTESTED.values()), "an exception needs a reason"


def test_a_module_without_its_test_and_an_exception_that_is_none_are_found(tmp_path: Path) -> None:
    package, tests = tmp_path / "package", tmp_path / "tests"
    for name in ("core.budget", "core.deep.plan", "top", "listed", "tested", "__main__"):
        write(package, name, "x = 1\n")
    for number in range(100):
        write(package, f"many.m{number}", "x = 1\n")
        write(tests, f"many.test_m{number}", A_TEST)
    write(package, "__init__", '"""Says."""\n__version__ = "1"\n')
    write(package, "core.__init__", "from core.budget import x\n__all__ = ['x']\n")
    write(package, "core.deep.__init__", "def f():\n    pass\n")
    write(tests, "core.deep.test_plan", A_TEST)
    write(tests, "test_tested", A_TEST)
    write(tests, "test_budget", A_TEST)  # not at its path
    write(tests, "test_top", "import pytest\n")  # no test in it

    assert find_untested(package, tests, ["listed", "tested", "gone", "core"]) == [
        "core.budget has no test at core/test_budget.py",
        "core.deep has no test at core/test_deep.py",
        "tested is an exception, but has a test",
        "top has no test at test_top.py",
        "gone is an exception, but no module with code",
        "core is an exception, but no module with code",
    ]


def test_more_exceptions_than_a_few_in_a_hundred_are_too_many(tmp_path: Path) -> None:
    package, tests = tmp_path / "package", tmp_path / "tests"
    names = [f"core.m{number:02}" for number in range(40)]
    for name in names:
        write(package, name, "x = 1\n")
    for name in names[3:]:
        write(tests, name.replace(".m", ".test_m"), A_TEST)

    assert find_untested(package, tests, names[:3]) == ["too many modules are exceptions"]
    write(tests, "core.test_m02", A_TEST)
    assert find_untested(package, tests, names[:2]) == []

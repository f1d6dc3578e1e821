"""Rewrite what pages in docs/ take from the code and from each other.

    uv run python .ci/docs_pages.py

docs/clients.md has what `connect` prints and the results of the client suite and of the agents,
docs/upgrade.md the keys that wait for a restart, docs/modules.md the purpose of each module,
docs/llms.txt the list of pages, docs/quality.md the figures of docs/quality.json, docs/demo.md the output of
the demo, and README.md a part of it. The repository on GitHub has the name that [project.urls] in
pyproject.toml has.
.ci/check_docs.py compares them.
"""

# ruff: noqa: INP001 - a script, not a package

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from compaction_proxy.cli.connect import CLIENTS, ClientGuide, fill_placeholders
from compaction_proxy.cli.demo.run import render_table
from compaction_proxy.config.config import RESTART_KEYS

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "bench"))

from quality.tables import list_coverage, list_probes  # noqa: E402 - of the benchmark

DOCS = ROOT / "docs"
PACKAGE = ROOT / "proxy" / "compaction_proxy"
# The files that name the repository on GitHub or its owner.
NAMING = (
    "pyproject.toml", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "docs/releases.md",
    ".github/CODEOWNERS", ".github/ISSUE_TEMPLATE/config.yml",
)  # fmt: skip
URL = "http://127.0.0.1:4141/v1"
MODEL = "gpt-5.4-mini"
# What a block of code is written in, by a word of where it goes; the first that fits.
LANGUAGES = {
    "Python": "python", "JavaScript": "js", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json",
    "shell": "sh", "environment": "sh",
}  # fmt: skip
# Those whose lines tests run as they stand; the others are read as what they are written in.
RUN = {"openai-python", "openai-node", "curl"}
# A row of the demo's table, and the turns that README.md shows.
TURN = re.compile(r" +(\d+) +[\d,]+ +[\d,]+ +\d+%")
SHOWN_TURNS = {1, 6, 18, 41}
# How a paragraph begins that is neither heading, table, list nor code.
PROSE = re.compile(r"\w|\*\*|`(?!``)")
CLIENTS_HEAD = """# Connect a client

This page has the settings with which each client uses the proxy. `compaction-proxy connect CLIENT` prints
the same, with the address of your proxy. `--apply` changes the file of CLIENT_FILES, and keeps the old one.
`compaction-proxy run -- COMMAND` changes only the environment of one command.

Keys stay where they are: the proxy forwards the key of the client to the provider. If the proxy has a
provider key of its own (`upstream.api_key`), the client may use any word as its key. If
`server.client_keys` is set, the client needs one of these keys. From a container, this machine is
`host.docker.internal`, and the proxy must listen on an address that the container reaches.

Without an id, the messages decide to which conversation a request belongs. Some
[headers](headers.md#conversation-ids) carry an id.

<!-- Written by .ci/docs_pages.py from what `connect` knows, from clients.json and from agents.json. -->
"""
# What the client suite runs, in the order of the columns.
WIRES = ("chat", "responses", "messages")
LANGUAGE_NAMES = {"python": "Python", "node": "JavaScript", "cli": "command"}
TABLE_HEAD = """
## Tested clients

The test suite runs each of these clients over real sockets with a scripted provider. It runs directly,
through the proxy, and through the proxy with a window so small that the long conversation must be
compacted. In a passed case, the client sees the same result each time, including errors. Requests without
compaction reach the provider byte for byte. In compacted requests, instructions, tools and the user's last
words are unchanged. The numbers are passed cases on each [wire](wires.md). A blank means that the client
was not tested on that wire.

| client | version | for | chat completions | Responses | Messages |
| --- | --- | --- | --- | --- | --- |
"""
TABLE_FOOT = """
The [results](clients.json) name each case. The suite is in `tests/system/clients`. `.ci/run` runs a part of
it, `.ci/run --full` all.
"""

AGENTS_HEAD = """
## Agents

`make test-agents` runs each of these programs in a session of 80 requests: a loop over its own tools,
resumed for a second task. The scripted provider is strict: it refuses broken tool pairs, altered
signatures, roles out of order, and requests larger than its window. `told` means that `models.*.window`
names the window, `learned` that the proxy learns it from a refusal.

A session passes if the client shows no error, no request is invalid, the proxy lists one conversation, and
the provider refuses at most one request as too long. Task, instructions and newest tool result must reach
the provider whole if they fit; without a compaction, the bytes must be the client's. There may be at most
one summary call for five requests, unless system prompt and tools take more than 60 % of the window.

A cell has two results: for a provider that counts the prompt against its window, and for one that counts
prompt and `max_tokens`. The number is that of summary calls; `-` means that the session was not run.

"""
# The windows that the agents are run with, and how the proxy gets to know them.
AGENT_COLUMNS = tuple(
    f"{window} {source}" for window in ("24k", "40k", "128k") for source in ("told", "learned")
)
COUNTINGS = ("prompt", "sum")
AGENTS_FOOT = """
The [results](agents.json) have all figures. The suite is in `tests/system/agents`, and `make test-agents
AGENTS=codex,aider WINDOWS=24k` runs a part of it.
"""


class Page(NamedTuple):
    """A page of the nav: its chapter, its title there, and its file below docs/."""

    chapter: str
    title: str
    file: str


def language(client: ClientGuide) -> str:
    """What a client's lines are written in."""
    return next((name for word, name in LANGUAGES.items() if word in client.destination), "text")


def client_chapter(name: str, client: ClientGuide) -> Iterator[str]:
    """A client's lines in docs/clients.md."""
    yield f"\n## {client.title}\n\n`{name}`. Into {client.destination}:\n"
    if name not in RUN and language(client) != "text":
        yield "<!-- block: only read, it belongs to another program -->\n"
    yield f"```{language(client)}\n{fill_placeholders(client.lines, URL, MODEL)}\n```"
    if client.remark:
        yield f"\n{client.remark}"


def passed(cases: Mapping[str, Mapping[str, str]], wire: str) -> str:
    """How many of a client's cases on a wire passed all three ways."""
    words = [ways.values() for case, ways in cases.items() if case.partition("/")[0] == wire]
    well = sum("failed" not in each for each in words)
    if not words:
        return ""
    return f"{well}" if well == len(words) else f"{well} of {len(words)}"


def tried() -> str:
    """The chapter on what came of the client suite; empty where it has not been run."""
    results = DOCS / "clients.json"
    if not results.exists():
        return ""
    rows = []
    for entry in json.loads(results.read_text("utf-8")):
        cells = [passed(entry["cases"], wire) for wire in WIRES]
        named = [f"`{entry['client']}`", entry["version"], LANGUAGE_NAMES[entry["language"]]]
        rows.append(f"| {' | '.join([*named, *cells])} |\n")
    return TABLE_HEAD + "".join(rows) + TABLE_FOOT


def agent_result(cell: Mapping[str, Any] | None) -> str:
    """What came of a session, in two words."""
    if cell is None:
        return "-"
    return f"{'fail' if cell['violations'] else 'pass'} {cell['summaries']}"


def agent_failures(entry: Mapping[str, Any]) -> Iterator[str]:
    """A line for each session of an agent that failed."""
    for name, cell in entry["cells"].items():
        counts = {**cell["violations"], "refusals": cell["refusals"], "summary calls": cell["summaries"]}
        words = ", ".join(f"{rule} ({counts[rule]})" for rule in cell["violations"])
        if words:
            yield f"- `{entry['client']}`, {entry['wire']}, {name}: {words}\n"


def agents() -> str:
    """The chapter on what came of the agents; empty where they have not been run."""
    results = DOCS / "agents.json"
    if not results.exists():
        return ""
    entries = json.loads(results.read_text("utf-8"))
    head = (
        f"| client | version | wire | {' | '.join(AGENT_COLUMNS)} |\n|{' --- |' * (3 + len(AGENT_COLUMNS))}\n"
    )
    rows = []
    for entry in entries:
        cells = (
            ", ".join(agent_result(entry["cells"].get(f"{column} {counting}")) for counting in COUNTINGS)
            for column in AGENT_COLUMNS
        )
        named = [f"`{entry['client']}`", entry["version"], entry["wire"]]
        rows.append(f"| {' | '.join([*named, *cells])} |\n")
    failures = "".join(line for entry in entries for line in agent_failures(entry))
    listed = f"\nFailures, and how often they occurred in the session:\n\n{failures}" if failures else ""
    return AGENTS_HEAD + head + "".join(rows) + listed + AGENTS_FOOT


def clients_page() -> str:
    """docs/clients.md."""
    lines = (line for name, client in CLIENTS.items() for line in client_chapter(name, client))
    edited = sorted(tool for tool, client in CLIENTS.items() if client.edit)
    head = CLIENTS_HEAD.replace("CLIENT_FILES", ", ".join(edited))
    return head + "\n".join(lines) + "\n" + tried() + agents()


def waiting_keys() -> str:
    """The keys that take effect with the next start."""
    shown = (f"`{name}`" + ("" if "." in name else " (all of it)") for name in RESTART_KEYS)
    return ", ".join(shown) + "."


def between(text: str, mark: str, new: str) -> str:
    """A page with what stands between two marks replaced."""
    place = re.compile(rf"(?<=<!-- {mark}:start -->\n).*?(?=\n<!-- {mark}:end -->)", re.DOTALL)
    return place.sub(lambda _: new, text)


def shorten_demo(text: str) -> str:
    """Returns the output of the demo with the rows of a few turns; a line `…` stands for those left out."""
    lines: list[str] = []
    for line in text.splitlines():
        turn = TURN.match(line)
        if turn is None or int(turn[1]) in SHOWN_TURNS:
            lines.append(line)
        elif lines[-1] != "   …":
            lines.append("   …")
    return "\n".join(lines) + "\n"


def pages() -> list[Page]:
    """The nav of mkdocs.yml, in its order."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    return list(flat(nav, ""))


def flat(nav: list[Mapping[str, object]], chapter: str) -> Iterator[Page]:
    """The pages of a part of the nav, those of chapters within it included."""
    for entry in nav:
        for title, inside in entry.items():
            if isinstance(inside, list):
                yield from flat(inside, title)
            else:
                yield Page(chapter, title, str(inside))


def opening(text: str) -> str:
    """The first sentence of a page, without marks."""
    paragraphs = (each for each in text.split("\n\n") if PROSE.match(each))
    # A decision's page begins with that word.
    paragraph = " ".join(next(paragraphs, "").split()).removeprefix("**Decision.** ")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*]{2}", r"\1", paragraph)
    sentence = re.split(r"(?<=[.?!:])\s(?=[A-Z`])", plain)[0].rstrip(".:")
    return sentence if sentence.endswith("?") else f"{sentence}."


def llms() -> str:
    """docs/llms.txt: which pages there are, for programs that read them."""
    index = (DOCS / "index.md").read_text("utf-8")
    lines = [
        "# compaction-proxy",
        f"\n> {opening(index)}",
        "\nAll pages in one file: [llms-full.txt](llms-full.txt)",
    ]
    before = ""
    for page in pages():
        if page.chapter != before:
            lines.append(f"\n## {page.chapter}\n")
            before = page.chapter
        if page.chapter:
            said = opening((DOCS / page.file).read_text("utf-8"))
            lines.append(f"- [{page.title}]({page.file}): {said}")
    return "\n".join(lines) + "\n"


def describe_module(path: Path) -> str:
    """Returns the first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s(?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def list_modules(package: Path) -> Iterator[str]:
    """Yields the lines that describe a package: its modules, then the packages in it."""
    name = package.relative_to(PACKAGE).as_posix()
    if name == ".":
        yield "\n| module | what it is for |\n| --- | --- |"
    else:
        said = describe_module(package / "__init__.py")
        yield f"\n### {name}/\n\n{said}\n\n| module | what it is for |\n| --- | --- |"
    for path in sorted(package.glob("*.py")):
        if not path.name.startswith("__"):
            yield f"| `{path.name}` | {describe_module(path)} |"
    for folder in sorted(package.iterdir()):
        if (folder / "__init__.py").is_file():
            yield from list_modules(folder)


def read_repository() -> str:
    """Returns the URL of the repository on GitHub."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"])


def name_repository(text: str) -> str:
    """Returns a text with the repository, the name of its image and its owner as [project.urls] has them."""
    repository = read_repository()
    owner, name = repository.removeprefix("https://github.com/").split("/")
    text = re.sub(r"https://github\.com/[\w.-]+/compaction-proxy\b", repository, text)
    text = re.sub(r"ghcr\.io/[\w.-]+/(?=(charts/)?compaction-proxy\b)", f"ghcr.io/{owner.lower()}/", text)
    text = re.sub(r"--repo [\w.-]+/[\w.-]+", f"--repo {owner}/{name}", text)
    return re.sub(r"^\* @[\w-]+", f"* @{owner}", text, flags=re.MULTILINE)


def quality_page() -> str:
    """Returns docs/quality.md with the figures of docs/quality.json."""
    page, figures = (DOCS / "quality.md").read_text("utf-8"), DOCS / "quality.json"
    measured = json.loads(figures.read_text("utf-8"))
    for name, list_paragraphs in (("coverage", list_coverage), ("probes", list_probes)):
        page = between(page, f"quality:{name}", "\n\n".join(list_paragraphs(measured[name])))
    return page


def generated() -> dict[Path, str]:
    """What each file should hold."""
    upgrade, modules = DOCS / "upgrade.md", DOCS / "modules.md"
    demo, readme = DOCS / "demo.md", ROOT / "README.md"
    described = "\n".join(list_modules(PACKAGE)).strip("\n")
    played = render_table()
    return {
        DOCS / "clients.md": clients_page(),
        upgrade: between(upgrade.read_text("utf-8"), "reload", waiting_keys()),
        modules: between(modules.read_text("utf-8"), "modules", described),
        DOCS / "quality.md": quality_page(),
        DOCS / "llms.txt": llms(),
        demo: between(demo.read_text("utf-8"), "demo", f"```text\n{played}```"),
        readme: between(readme.read_text("utf-8"), "demo", f"```text\n{shorten_demo(played)}```"),
    } | {ROOT / name: name_repository((ROOT / name).read_text("utf-8")) for name in NAMING}


def main() -> None:
    """Rewrite the files, clients first: the list of pages quotes it."""
    (DOCS / "clients.md").write_text(clients_page(), "utf-8")
    for path, text in generated().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()

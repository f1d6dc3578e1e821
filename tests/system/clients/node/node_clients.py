"""The clients of the suite that are npm packages, each pinned by the lock in its folder here.

They run on the Node.js of `tests/helpers/openai_node.py`, which is new enough for the newest of each.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.helpers import openai_node
from tests.system.clients.playing import Client, in_short

HERE = Path(__file__).parent
# Modules are looked for from where the importing file is: drivers are copied beside a link to the packages,
# which have to find one another through it.
STAGED = 'cp "$1" "$2" . && ln -s "$3" node_modules && exec "$4" --preserve-symlinks driver.mjs'


def _driven(name: str, packages: Path) -> Callable[[], list[str]]:
    """The command line of a driver, which is run in an empty folder."""
    shell = shutil.which("sh") or "/bin/sh"
    files = [HERE / "playing.mjs", HERE / name / "driver.mjs"]

    def command() -> list[str]:
        used = [*files, openai_node.installed(packages), openai_node.NODE]
        return [shell, "-c", STAGED, name, *map(str, used)]

    return command


def _node(name: str, package: str, *wires: str, packages: Path | None = None) -> Client:
    packages = packages or HERE / name
    lock = json.loads((packages / "package-lock.json").read_text("utf-8"))
    version = lock["packages"][f"node_modules/{package}"]["version"]
    return Client(f"{name} for node", package, "node", version, wires, _driven(name, packages))


NODE = (
    _node("openai", "openai", "chat", "responses", packages=openai_node.PACKAGES),
    _node("anthropic", "@anthropic-ai/sdk", "messages"),
    _node("langchain", "@langchain/openai", "chat", "responses", "messages"),
    _node("ai-sdk", "ai", "chat", "responses", "messages"),
)
QUICK = (in_short(NODE[0], "responses", "helper", "tools", "error-429", "cut", "timeout", "growing"),)

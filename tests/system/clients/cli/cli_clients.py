"""The clients of the suite that people use at a prompt, each with an environment of its own."""

from collections.abc import Callable

from tests.system.clients.environments import locked_version, python_environment
from tests.system.clients.playing import Client


def _driven(name: str) -> Callable[[], list[str]]:
    return lambda: [str(python_environment(name)), "-m", f"tests.system.clients.cli.drive_{name}"]


def _cli(name: str, package: str, *wires: str, **variables: str) -> Client:
    version = locked_version(name, package)
    return Client(name, package, "cli", version, wires, _driven(name), variables)


CLI = (
    _cli("aider", "aider-chat", "chat", LITELLM_LOCAL_MODEL_COST_MAP="True"),
    _cli("llm", "llm", "chat", "responses", LLM_USER_PATH="."),
)

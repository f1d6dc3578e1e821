"""All clients of the suite that are Python packages, and which of them the quick run takes."""

from collections.abc import Callable, Mapping

from tests.clients.environments import locked_version, python_environment
from tests.clients.playing import Client


def _driven(name: str) -> Callable[[], list[str]]:
    """The command line of a driver, whose module is named after its environment."""
    module = f"tests.clients.python.drive_{name.replace('-', '_')}"
    return lambda: [str(python_environment(name)), "-m", module]


def _python(name: str, package: str, *wires: str, **variables: str) -> Client:
    told: Mapping[str, str] = variables
    return Client(name, package, "python", locked_version(name, package), wires, _driven(name), told)


QUICK = (_python("openai", "openai", "chat"),)
PYTHON = (*QUICK,)

"""All clients of the suite that are Python packages, and what of them the quick run takes."""

from collections.abc import Callable

from tests.system.clients.environments import locked_version, python_environment
from tests.system.clients.playing import Client, in_short


def _driven(name: str) -> Callable[[], list[str]]:
    """The command line of a driver, whose module is named after its environment."""
    module = f"tests.system.clients.python.drive_{name.replace('-', '_')}"
    return lambda: [str(python_environment(name)), "-m", module]


def _python(name: str, package: str, *wires: str, **variables: str) -> Client:
    version = locked_version(name, package)
    return Client(name, package, "python", version, wires, _driven(name), variables)


PYTHON = (
    _python("openai", "openai", "chat", "responses"),
    _python("anthropic", "anthropic", "messages"),
    _python("langchain", "langchain-openai", "chat", "responses", "messages", LANGSMITH_TRACING="false"),
    _python("openai-agents", "openai-agents", "chat", "responses"),
    _python("pydantic-ai", "pydantic-ai-slim", "chat", "responses", "messages"),
    _python(
        "litellm", "litellm", "chat", "responses", "messages",
        LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_TELEMETRY="False",
    ),
    _python("llama-index", "llama-index-llms-openai-like", "chat"),
    _python("instructor", "instructor", "chat", "responses"),
)  # fmt: skip
_ANTHROPIC = PYTHON[1]
# Responses is taken from the npm package, which loads in a third of the time; chat with OpenAI's library for
# Python is what tests/system/sdk is about.
QUICK = (
    in_short(
        _ANTHROPIC, "messages",
        "stream-tools", "thinking", "count-tokens", "error-400", "timeout", "growing",
    ),
)  # fmt: skip

"""Whether a request is offered the tool by which its model searches what was removed.

Offering a tool to a model, or to a server, that takes none ends in an error that the client would not have
got. So a model takes tools where the configuration says so, where the request brings tools itself, or where
its name stands for a service that takes them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Protocol

from compaction_proxy.core.model_names import find_by_prefix
from compaction_proxy.providers.windows import normalize_name

RecallToolMode = Literal["none", "inject", "always"]

# Names that only their makers, and clouds on their behalf, answer to, by prefix; the longest one decides.
# From PyPI litellm 1.109.1 (`supports_function_calling`) and the makers' pages of models. Open weights are
# not here: whether they take tools depends on how their server was started.
_TAKING_TOOLS: Mapping[str, bool] = MappingProxyType(
    {
        "claude": True,
        "claude-2": False,
        "claude-instant": False,
        "deepseek-chat": True,
        "deepseek-reasoner": True,
        "gemini-": True,
        "gemini-1.0": False,
        "gemini-omni": False,
        "gpt-3.5-turbo": True,
        "gpt-3.5-turbo-instruct": False,
        "gpt-35-turbo": True,
        "gpt-35-turbo-instruct": False,
        "gpt-4": True,
        "gpt-4-32k": False,
        "gpt-4-turbo-vision": False,
        "gpt-4-vision": False,
        "gpt-4o-audio": False,
        "gpt-4o-mini-search": False,
        "gpt-4o-search": False,
        "gpt-5": True,
        "gpt-5-chat": False,
        "gpt-6": True,
        "grok-": True,
        "grok-1": False,
        "kimi-latest": True,
        "mistral-large": True,
        "mistral-medium": True,
        "mistral-small-latest": True,
        "moonshot-v1": True,
        "nova-": True,
        "o1": True,
        "o1-mini": False,
        "o1-preview": False,
        "o3": True,
        "o3-deep-research": False,
        "o4": True,
        "o4-mini-deep-research": False,
        "qwen-flash": True,
        "qwen-max": True,
        "qwen-plus": True,
        "qwen-turbo": True,
    }
)


class RecallSettings(Protocol):
    """What is configured of recall, as far as it matters here."""

    @property
    def tool(self) -> RecallToolMode:
        """`none`, `inject` (once something has been compacted) or `always`."""


class ToolOfferSettings(Protocol):
    """What is configured for a model, as far as it matters here."""

    @property
    def recall(self) -> RecallSettings:
        """How the model gets at what was removed."""

    @property
    def tools(self) -> bool | None:
        """Whether the model takes tools; None: as its name says."""


def supports_tools(model: str) -> bool:
    """Whether a model is known by its name to take tools, wherever it is served."""
    return find_by_prefix(normalize_name(model), _TAKING_TOOLS) or False


def should_offer_tool(settings: ToolOfferSettings, *, compacted: bool, has_tools: bool, model: str) -> bool:
    """Whether a request is offered the search tool, if it can be (`dialects.tools.offering`).

    Args:
        settings: What holds for its model.
        compacted: Whether something of the conversation has been removed.
        has_tools: Whether the request brings tools of its own.
        model: The model that will answer.
    """
    tool = settings.recall.tool
    if tool == "none" or not (compacted or tool == "always"):
        return False
    if settings.tools is not None:
        return settings.tools
    return has_tools or supports_tools(model)

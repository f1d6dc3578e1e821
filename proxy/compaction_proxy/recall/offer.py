"""Decides whether a request is offered the tool with which its model searches the removed messages.

If a model or a server does not accept tools, an offered tool causes an error that the client would not have
got otherwise. So the tool is offered only if the configuration says that the model accepts tools, if the
request has tools of its own, or if the model is known by its name to be served only by services that accept
tools.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Protocol

from compaction_proxy.core.model_names import find_by_prefix
from compaction_proxy.providers.windows import normalize_name

RecallToolMode = Literal["none", "inject", "always"]

# Whether a model accepts tools, by the prefix of its name. The longest prefix decides. Listed are only models
# that are served by their makers, or by clouds on their behalf. Source: PyPI litellm 1.109.1
# (`supports_function_calling`) and the makers' pages of models. Models with open weights are not listed:
# whether they accept tools depends on how their server was started.
_TOOL_SUPPORT: Mapping[str, bool] = MappingProxyType(
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
    """The part of the recall settings that is needed here."""

    @property
    def tool(self) -> RecallToolMode:
        """`none`, `inject` (once something has been compacted) or `always`."""


class ToolOfferSettings(Protocol):
    """The part of a model's settings that is needed here."""

    @property
    def recall(self) -> RecallSettings:
        """How the model gets access to removed messages."""

    @property
    def tools(self) -> bool | None:
        """Whether the model accepts tools. None means that the request or the model's name decides."""


def supports_tools(model: str) -> bool:
    """Returns whether a model is known by its name to accept tools, wherever it is served."""
    return find_by_prefix(normalize_name(model), _TOOL_SUPPORT) or False


def should_offer_tool(
    settings: ToolOfferSettings, *, is_compacted: bool, has_tools: bool, model: str
) -> bool:
    """Returns whether a request should be offered the search tool, if its wire allows it.

    Args:
        settings: The settings of its model.
        is_compacted: Whether something of the conversation has been removed.
        has_tools: Whether the request has tools of its own.
        model: The model that will answer.
    """
    tool = settings.recall.tool
    if tool == "none" or not (is_compacted or tool == "always"):
        return False
    if settings.tools is not None:
        return settings.tools
    return has_tools or supports_tools(model)

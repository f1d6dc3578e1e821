"""Decides whether the proxy adds its search tool to a request, so that the model can search removed messages.

If the model or its server does not accept tools, the added tool causes an error that the client would not
have got otherwise. If the configuration says whether the model accepts tools, the proxy relies on that.
Otherwise it adds the tool only if the request has tools of its own, or if every service that offers a model
of this name is known to accept tools.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Protocol

from compaction_proxy.core.model_names import find_by_prefix
from compaction_proxy.providers.windows import normalize_name

RecallToolMode = Literal["none", "inject", "always"]

# Maps the prefix of a model's name to whether the model accepts tools. The longest matching prefix decides.
# The table contains only models that are served by their makers, or by cloud providers for the makers. It
# contains no models with open weights, because the start options of their server decide whether they accept
# tools. Sources: PyPI litellm 1.109.1 (`supports_function_calling`) and the makers' pages about their models.
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
    """The settings for the search tool that `should_offer_tool` reads."""

    @property
    def tool(self) -> RecallToolMode:
        """When to add the tool: `none` (never), `inject` (if messages have been removed), or `always`."""


class ToolOfferSettings(Protocol):
    """The settings of a model that `should_offer_tool` reads."""

    @property
    def recall(self) -> RecallSettings:
        """Settings for the model's access to removed messages."""

    @property
    def tools(self) -> bool | None:
        """Whether the model accepts tools.

        None if this is not configured. Then `should_offer_tool` decides by the tools of the request and by
        the name of the model.
        """


def supports_tools(model: str) -> bool:
    """Returns whether every service that offers a model of this name is known to accept tools for it."""
    return find_by_prefix(normalize_name(model), _TOOL_SUPPORT) or False


def should_offer_tool(
    settings: ToolOfferSettings, *, is_compacted: bool, has_tools: bool, model: str
) -> bool:
    """Returns whether the proxy should add its search tool to a request.

    The caller must check whether the proxy can add a tool to this request at all.

    Args:
        settings: The settings of the request's model.
        is_compacted: Whether a compaction has removed messages of the conversation.
        has_tools: Whether the request has tools of its own.
        model: The name of the model to which the request goes.
    """
    tool = settings.recall.tool
    if tool == "none" or not (is_compacted or tool == "always"):
        return False
    if settings.tools is not None:
        return settings.tools
    return has_tools or supports_tools(model)

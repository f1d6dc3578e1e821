"""Defines the whole configuration, the settings for one model, and the policy that follows from them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel

from compaction_proxy.config.sections import (
    ArchiveSection,
    CompactionSection,
    ModelSection,
    ObservabilitySection,
    RecallSection,
    ServerSection,
    SessionSection,
    StoreSection,
    SummarySection,
    UpstreamSection,
)
from compaction_proxy.config.strategies import POLICY_FIELDS, replace_policy_field
from compaction_proxy.config.types import STRICT
from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.strategies import ANCHORED, STRATEGIES, Policy
from compaction_proxy.core.trigger import TriggerRule

Section = TypeVar("Section", bound=BaseModel)


@dataclass(frozen=True, slots=True, eq=False)
class ModelSettings:
    """The settings for one model, with the overrides of its glob applied.

    They are built once for each glob, so two objects are compared by identity.

    Attributes:
        window: Largest number of input tokens. None uses the number that is learned from the provider, else
            that of the shipped table of models, else the default.
        reserve_output: Tokens set aside for the answer; None uses the strategy's own number.
        alternation: `strict` if user and assistant messages must alternate.
        compaction: When and how to compact.
        summary: Which model writes summaries, and how.
        prices: Prices of the model; None uses the price table.
        recall: How the model reaches removed messages.
        tools: Whether the model accepts tools; None decides by its name (`recall.offer.supports_tools`).
    """

    window: int | None
    reserve_output: int | None
    alternation: Literal["none", "strict"]
    compaction: CompactionSection
    summary: SummarySection
    prices: ModelPrice | None = None
    recall: RecallSection = field(default_factory=RecallSection)
    tools: bool | None = None


class GlobSettings(NamedTuple):
    """The settings for the models that match a glob."""

    glob: str
    pattern: re.Pattern[str]
    settings: ModelSettings


class Config(BaseModel):
    """The whole configuration. A key that is not set has its default."""

    model_config = STRICT
    server: ServerSection = ServerSection()
    """Where clients reach us."""
    upstream: UpstreamSection = UpstreamSection()
    """Where requests go."""
    store: StoreSection = StoreSection()
    """Where derived data is kept."""
    session: SessionSection = SessionSection()
    """How a conversation is recognised."""
    compaction: CompactionSection = CompactionSection()
    """When and how a conversation is compacted."""
    summary: SummarySection = SummarySection()
    """Who writes summaries."""
    archive: ArchiveSection = ArchiveSection()
    """How much of what was removed is kept."""
    recall: RecallSection = RecallSection()
    """How the model gets at what was removed."""
    models: dict[str, ModelSection] = {}
    """Settings by model: globs over the model's name, case matters, the first match wins."""
    observability: ObservabilitySection = ObservabilitySection()
    """What we say about ourselves."""

    @cached_property
    def settings_by_glob(self) -> tuple[GlobSettings, ...]:
        """The settings for each glob, in the order in which globs are tried. One of the globs is `*`."""
        sections = {**self.models, "*": self.models.get("*", ModelSection())}
        return tuple(
            GlobSettings(
                glob,
                re.compile(translate(glob)),
                ModelSettings(
                    window=section.window,
                    reserve_output=section.reserve_output,
                    alternation=section.alternation,
                    compaction=_overlay_section(self.compaction, section.compaction),
                    summary=_overlay_section(self.summary, section.summary),
                    prices=section.prices.to_price() if section.prices else None,
                    recall=_overlay_section(self.recall, section.recall),
                    tools=section.tools,
                ),
            )
            for glob, section in sections.items()
        )


def _merge_mappings(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with the values of `overrides` in place of its own. Nested mappings are merged too."""
    merged = dict(base)
    for key, value in overrides.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge_mappings(merged[key], value) if nested else value
    return merged


def _overlay_section(base: Section, overrides: Section | None) -> Section:
    """Returns `base` with the keys that `overrides` sets. Keys that neither section sets stay unset."""
    if overrides is None:
        return base
    merged = _merge_mappings(base.model_dump(exclude_unset=True), overrides.model_dump(exclude_unset=True))
    return type(base).model_validate(merged)


def get_model_settings(config: Config, model: str) -> ModelSettings:
    """Returns the settings for a model. They are built once per glob, so a call per request is cheap."""
    return next(row.settings for row in config.settings_by_glob if row.pattern.match(model))


def build_policy(settings: ModelSettings, strategy_name: str | None = None) -> Policy:
    """Builds a strategy's policy: its built-in numbers and rules, with the changes from the configuration.

    The strategy's own keys are applied first. A key for all strategies overrides them if it is set.

    Args:
        settings: Settings for the model.
        strategy_name: Name of the strategy that a request asked for; None uses the configured one.

    Raises:
        KeyError: There is no strategy of that name.
    """
    compaction, keep, summary = settings.compaction, settings.compaction.keep, settings.summary
    policy = STRATEGIES[strategy_name or compaction.strategy]
    fields = getattr(compaction.strategies, policy.name)
    shared_keys = {
        "output_reserve_tokens": settings.reserve_output,
        "target_tokens": compaction.target_tokens,
        "max_block_s": compaction.max_block_s,
        "stand_in_role": compaction.stand_in_role,
        "keep_messages": keep.messages,
        "tail_tokens": keep.tail_tokens,
        "ledger_tokens": keep.user_tokens,
        "keep_tool_results": keep.tool_results,
        "summary_max_tokens": summary.max_tokens,
        "summary_input": summary.input,
    }
    own_fields = ((name, value) for name, value in fields if name in fields.model_fields_set)
    shared_fields = ((name, value) for name, value in shared_keys.items() if value is not None)
    for name, value in (*own_fields, *shared_fields):
        if name in POLICY_FIELDS:
            policy = replace_policy_field(policy, name, value)
    if compaction.trigger is not None:
        policy = replace(policy, trigger=tuple(TriggerRule(**dict(row)) for row in compaction.trigger))
    if compaction.background is not None:
        soft_share = policy.soft_share or ANCHORED.soft_share
        policy = replace(policy, soft_share=soft_share if compaction.background else 0.0)
    if policy.summary and (fields.prompt_file or summary.prompt_file):
        policy = replace(
            policy, summary=replace(policy.summary, sections=())
        )  # the user's prompt defines its own sections
    return policy

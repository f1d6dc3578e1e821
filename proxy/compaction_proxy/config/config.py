"""Defines the configuration and its keys, and derives from it the settings and the policy for a model.

This module also suggests the right key for a wrong name, and compares two configurations.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import translate
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, SecretStr

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
from compaction_proxy.config.types import STRICT, OnlyValue, mask_passwords, unwrap_type
from compaction_proxy.config.yaml_file import KeyPath
from compaction_proxy.core.cost.price import ModelPrice
from compaction_proxy.core.strategies import ANCHORED, STRATEGIES, Policy
from compaction_proxy.core.trigger import TriggerRule

Section = TypeVar("Section", bound=BaseModel)


@dataclass(frozen=True, slots=True, eq=False)
class ModelSettings:
    """The settings for a model, with the overrides in the entry of `models` that matches the model's name.

    There is one object for each key (glob) of `models`, so objects are compared by identity.

    Attributes:
        window: Largest number of input tokens. None uses the number that is learned from the provider, else
            that of the shipped table of models, else the default.
        reserve_output: Tokens set aside for the output; None uses the strategy's own number.
        alternation: `strict` if user and assistant messages must alternate.
        compaction: When and how to compact.
        summary: Which model writes summaries, and how.
        prices: Prices of the model; None uses the price table.
        recall: How the model reaches removed messages.
        tools: Whether the model accepts tools. None decides by the request's own tools and the model's name
            (`recall.offer.should_offer_tool`).
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
    """The settings for the models whose names match a glob. `pattern` is the glob as a regular expression."""

    glob: str
    pattern: re.Pattern[str]
    settings: ModelSettings


class Config(BaseModel):
    """The whole configuration. A key that is not set has its default."""

    model_config = STRICT
    server: ServerSection = ServerSection()
    """Where clients reach the proxy, and limits for their requests."""
    upstream: UpstreamSection = UpstreamSection()
    """Where requests go."""
    store: StoreSection = StoreSection()
    """Where the proxy keeps its data."""
    session: SessionSection = SessionSection()
    """How the proxy identifies a conversation."""
    compaction: CompactionSection = CompactionSection()
    """When and how to compact a conversation."""
    summary: SummarySection = SummarySection()
    """Which model writes summaries, and how."""
    archive: ArchiveSection = ArchiveSection()
    """How much text of removed messages the proxy keeps."""
    recall: RecallSection = RecallSection()
    """How the model reaches removed messages."""
    models: dict[str, ModelSection] = {}
    """Settings by model. Each key is a glob for the model's name. Case matters, and the first match wins."""
    observability: ObservabilitySection = ObservabilitySection()
    """Logs, metrics and traces of the proxy."""

    @cached_property
    def settings_by_glob(self) -> tuple[GlobSettings, ...]:
        """The settings for each key (glob) of `models`, in the order in which the globs are tried.

        If `models` has no key `*`, the last entry is for `*` and has no overrides.
        """
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
    """Returns a copy of `base`, in which the values of `overrides` are added or replace those of `base`.

    Merges nested mappings in the same way.
    """
    merged = dict(base)
    for key, value in overrides.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge_mappings(merged[key], value) if nested else value
    return merged


def _overlay_section(base: Section, overrides: Section | None) -> Section:
    """Returns a section with the keys that `overrides` sets, and with the other keys of `base`."""
    if overrides is None:
        return base
    merged = _merge_mappings(base.model_dump(exclude_unset=True), overrides.model_dump(exclude_unset=True))
    return type(base).model_validate(merged)


def get_model_settings(config: Config, model: str) -> ModelSettings:
    """Returns the settings for a model. This is fast, because the settings are built once for each glob."""
    return next(row.settings for row in config.settings_by_glob if row.pattern.match(model))


def build_policy(settings: ModelSettings, strategy_name: str | None = None) -> Policy:
    """Builds a strategy's policy: its built-in numbers and rules, with the changes from the configuration.

    The strategy's own keys are applied first. Then the keys for all strategies, such as
    `compaction.target_tokens`, override them if they are set.

    Args:
        settings: Settings for the model.
        strategy_name: Name of the strategy that a request asked for; None uses the configured one.

    Raises:
        KeyError: If there is no strategy of that name.
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


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key of the configuration.

    Attributes:
        path: Names of the sections from the outermost inwards, followed by the name of the key.
        value_type: Type of its value, without `| None`.
        default: Its default.
        description: Its meaning, with its unit.
        is_supported: Whether the key can be changed. False if this version accepts only the default.
        is_nullable: Whether it may be null.
    """

    path: KeyPath
    value_type: object
    default: object
    description: str
    is_supported: bool
    is_nullable: bool


def format_key_path(path: KeyPath) -> str:
    """Formats the path of a key with dots, such as `server.port`."""
    return ".".join(map(str, path))


def get_section_type(value_type: object) -> type[BaseModel] | None:
    """Returns `value_type` if it is the type of a section, else None."""
    return value_type if isinstance(value_type, type) and issubclass(value_type, BaseModel) else None


def get_key_type(path: KeyPath) -> object | None:
    """Returns the type of the value at a path, without `| None`; None if there is no such path."""
    kind: object | None = Config
    for step in path:
        section = get_section_type(kind)
        if section is not None:
            field = section.model_fields.get(str(step))
            kind = unwrap_type(field.annotation) if field else None
        else:
            inner = get_args(kind)
            kind = unwrap_type(inner[-1 if get_origin(kind) is dict else 0]) if inner else None
    return kind


def iter_keys(section: type[BaseModel] = Config, parent_path: KeyPath = ()) -> Iterator[ConfigKey]:
    """Yields every key in `section` and its nested sections, in order. Does not yield the sections.

    `parent_path` is the path of `section`. The path of each key begins with it.
    """
    for name, model_field in section.model_fields.items():
        place, kind = (*parent_path, name), unwrap_type(model_field.annotation)
        nested = get_section_type(kind)
        if nested is not None and isinstance(model_field.default, nested):
            yield from iter_keys(nested, place)
        else:
            is_supported = not any(isinstance(mark, OnlyValue) for mark in model_field.metadata)
            nullable = type(None) in get_args(model_field.annotation)
            yield ConfigKey(
                place, kind, model_field.default, model_field.description or "", is_supported, nullable
            )


def suggest_key(path: KeyPath) -> str:
    """Returns `, did you mean 'x'?` for a path that does not exist; empty if no key has a similar name.

    The suggestion replaces the first wrong name in the path. If the wrong name consists of the name of a key
    and an ending (`trigger_tokens`), the suggestion is that key (`trigger`).
    """
    wrong = next((k for k in range(len(path)) if get_key_type(path[: k + 1]) is None), len(path) - 1)
    section, word = get_section_type(get_key_type(path[:wrong])), str(path[wrong])
    names = tuple(section.model_fields) if section else ()
    longer = [name for name in names if word.startswith(f"{name}_")]
    close = longer or get_close_matches(word, names, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def to_plain_value(value: object) -> object:
    """Converts a value to types that YAML and JSON can represent.

    Replaces secrets, and passwords in texts, by asterisks. An empty secret becomes an empty text. From a
    section, keeps only the keys that are set.
    """
    if isinstance(value, SecretStr):
        return "********" if value.get_secret_value() else ""
    if isinstance(value, str):
        return mask_passwords(value)
    if isinstance(value, BaseModel):
        return {name: to_plain_value(inner) for name, inner in value if name in value.model_fields_set}
    if isinstance(value, dict):
        return {name: to_plain_value(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [to_plain_value(inner) for inner in value]
    return value


# A change of these keys and sections takes effect only with the next start of the proxy, because they
# configure objects that the proxy creates once, such as sockets and the store.
RESTART_KEYS = (
    "server.host", "server.port", "server.unix_socket", "server.tls_certificate", "server.tls_key",
    "server.secret", "server.previous_secrets", "server.workers", "server.accept_grace_s", "server.drain_s",
    "server.max_inflight_bytes", "server.max_in_flight", "server.head_timeout_s", "server.body_timeout_s",
    "server.send_timeout_s", "store", "archive", "upstream.engine", "observability",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """The difference between the current configuration and a new one.

    Attributes:
        config: The configuration to apply now: the new one, but with the old values of the keys in
            `waiting_for_restart`.
        changed: Dotted keys that take effect now.
        waiting_for_restart: Dotted keys that take effect with the next start.
    """

    config: Config
    changed: tuple[str, ...]
    waiting_for_restart: tuple[str, ...]


def compare_configs(old: Config, new: Config) -> ConfigChange:
    """Compares two configurations and returns the change from the old one to the new one."""
    names = [format_key_path(key.path) for key in iter_keys()]
    names = [name for name in names if attrgetter(name)(old) != attrgetter(name)(new)]
    waiting = [
        name
        for name in names
        if name.startswith(tuple(f"{each}." for each in RESTART_KEYS)) or name in RESTART_KEYS
    ]
    sections: dict[str, Any] = {}
    for name in waiting:
        section, key = name.split(".", 1)
        current = sections.get(section, getattr(new, section))
        sections[section] = current.model_copy(update={key: getattr(getattr(old, section), key)})
    config = new.model_copy(update=sections) if sections else new
    return ConfigChange(config, tuple(name for name in names if name not in waiting), tuple(waiting))

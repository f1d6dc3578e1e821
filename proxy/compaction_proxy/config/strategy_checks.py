"""Whether the settings of strategies fit together, for each glob of models."""

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from compaction_proxy.config.config import Config, ModelSettings
from compaction_proxy.config.keys import dotted
from compaction_proxy.config.policy import row_for
from compaction_proxy.config.row_fields import shown
from compaction_proxy.config.yaml_file import Place
from compaction_proxy.core.budget import budget
from compaction_proxy.core.strategies import STRATEGIES, Policy
from compaction_proxy.core.trigger import automatic, marks

# Stands for a window that nobody has configured, in tokens: triggers in percent are then out of reach.
BOUNDLESS_TOKENS = 10**12
UNREADABLE = "the file cannot be read"


def readable(path: str) -> bool:
    """Whether a file that is named in the configuration can be read."""
    file = Path(path).expanduser()
    return file.is_file() and os.access(file, os.R_OK)


def is_set(section: BaseModel | None, place: Place) -> bool:
    """Whether a source has set the key at this place of a section, to something other than null."""
    for step in place:
        if section is None or step not in section.model_fields_set:
            return False
        section = getattr(section, str(step))
    return section is not None


def place_in(config: Config, glob: str, place: Place) -> Place:
    """Where what holds for a glob was set: in its entry of `models`, or for all models."""
    return ("models", glob, *place) if is_set(config.models.get(glob), place) else place


def _strategy_place(name: str, key: str) -> Place:
    return ("compaction", "strategies", name, key)


def _prompt_problems(settings: ModelSettings) -> Iterator[tuple[Place, str]]:
    """Every strategy counts: a request may ask for any."""
    for name, fields in settings.compaction.strategies:
        file = getattr(fields, "prompt_file", None)
        if file is not None and not readable(file):
            yield _strategy_place(name, "prompt_file"), UNREADABLE


def _set_by(settings: ModelSettings, row: Policy, above: Place, keys: tuple[str, ...]) -> Place | None:
    """The key that has changed a field: one for all strategies, or the first of the strategy's own."""
    if is_set(settings.compaction, above[1:]):
        return above
    fields = getattr(settings.compaction.strategies, row.name)
    own = (key for key in keys if key in type(fields).model_fields)
    changed = (key for key in own if getattr(fields, key) != shown(STRATEGIES[row.name], key))
    return next((_strategy_place(row.name, key) for key in changed), None)


def _size_problems(settings: ModelSettings) -> Iterator[tuple[Place, str]]:
    """Sizes that leave a round nothing to win: a target at the trigger, a tail at the target."""
    row = row_for(settings)
    if not automatic(row.trigger):
        return
    spending = budget(settings.window or BOUNDLESS_TOKENS, row.reserves, None)
    trigger = marks(row.trigger, spending, row.soft_share, row.hard_percent).trigger
    aimed = _set_by(settings, row, ("compaction", "target_tokens"), ("target_tokens",))
    wanted = row.target.tokens if row.target else None
    if aimed and wanted is not None and wanted >= trigger:
        yield aimed, f"{wanted:,} tokens are not below the trigger of {trigger:,}: a round would win nothing"
        return
    kept = _set_by(settings, row, ("compaction", "keep", "tail_tokens"), ("tail_tokens", "tail_percent"))
    most, tail = row.target.of(trigger) if row.target else trigger, row.keep.tail
    if kept and tail and tail.of(trigger) >= most:
        what = "target" if row.target else "trigger"
        yield kept, f"what stays is not below the {what}: a round would win nothing"


def problems(config: Config) -> Iterator[tuple[Place, str]]:
    """Each place whose value does not fit the others, and why."""
    for each in config.by_glob:
        for place, what in (*_prompt_problems(each.settings), *_size_problems(each.settings)):
            yield place_in(config, each.glob, place), what


def warnings(config: Config) -> Iterator[str]:
    """What works but is probably not meant; one line each."""
    for each in config.by_glob:
        row = row_for(each.settings)
        if row.summary and row.stand_in_role == "system":
            yield _system_role(config, each.glob, each.settings, row)
        for name in STRATEGIES:
            asked, allowed = (_strategy_place(name, f"summary_{which}tokens") for which in ("", "max_"))
            fields = getattr(each.settings.compaction.strategies, name)
            if {asked[-1], allowed[-1]} <= fields.model_fields_set and (
                fields.summary_max_tokens < fields.summary_tokens
            ):
                where = dotted(place_in(config, each.glob, allowed))
                yield f"{where}: less than summary_tokens, so no more than this is asked for"


def _system_role(config: Config, glob: str, settings: ModelSettings, row: Policy) -> str:
    role = ("compaction", "stand_in_role")
    chosen = is_set(settings.compaction, role[1:])
    where = dotted(place_in(config, glob, role if chosen else ("compaction", "strategy")))
    return (
        f"{where}: {row.name} gives its summaries the system role, so that what tools said may pass for an "
        "instruction; compaction.stand_in_role: user prevents that"
    )

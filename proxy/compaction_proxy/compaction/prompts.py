"""Builds the system prompt of summary calls from a prompt file and the configured instructions."""

from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from compaction_proxy.compaction.request_limits import resolve_policy
from compaction_proxy.config.config import Config, ModelSettings, get_model_settings
from compaction_proxy.core.errors import ConfigError
from compaction_proxy.core.strategies import STRATEGIES, Policy

MAX_PROMPT_BYTES = 262_144


@lru_cache(maxsize=64)
def _load_prompt(prompt_file: str | None, built_in: str) -> str:
    if prompt_file is None:
        return files("compaction_proxy").joinpath("prompts", f"{built_in}.md").read_text(encoding="utf-8")
    path = Path(prompt_file).expanduser()
    try:
        data = path.read_bytes()
        if len(data) > MAX_PROMPT_BYTES:
            raise ConfigError(f"summary.prompt_file: {path}: larger than {MAX_PROMPT_BYTES} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"summary.prompt_file: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"summary.prompt_file: {path}: is not UTF-8") from None


def build_summary_instructions(settings: ModelSettings, policy: Policy) -> str:
    """Returns the system prompt of summary calls; empty if the strategy writes no summaries.

    All calls with the same settings and strategy get the same prompt. The text of a prompt file is cached, so
    later changes to the file have no effect.

    Raises:
        ConfigError: The prompt file cannot be read.
    """
    if policy.summary is None:
        return ""
    strategy_settings = getattr(settings.compaction.strategies, policy.name)
    prompt_file = strategy_settings.prompt_file or settings.summary.prompt_file
    text = _load_prompt(prompt_file, policy.summary.prompt_name).replace(
        "{tokens}", str(policy.summary.tokens)
    )
    instructions = (
        settings.summary.instructions
        if strategy_settings.instructions is None
        else strategy_settings.instructions
    )
    extra = instructions.strip()
    return f"{text.rstrip()}\n\n{extra}\n" if extra else text


def check_prompt_files(config: Config) -> None:
    """Checks that every prompt file that the configuration names can be read.

    Raises:
        ConfigError: A prompt file cannot be read.
    """
    for model in ("", *config.models):
        settings = get_model_settings(config, model)
        for name in STRATEGIES:
            build_summary_instructions(settings, resolve_policy(settings, name))

"""The system prompt of summary calls: the strategy's prompt file, or the user's, and what the user adds."""

from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from compaction_proxy.compaction.request_limits import policy_for
from compaction_proxy.config.config import Config, ModelSettings, for_model
from compaction_proxy.core.errors import ConfigError
from compaction_proxy.core.strategies import STRATEGIES, Policy

MAX_PROMPT_BYTES = 262_144


@lru_cache(maxsize=64)
def _text(prompt_file: str | None, built_in: str) -> str:
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


def instructions(settings: ModelSettings, policy: Policy) -> str:
    """The system prompt, the same for every call with these settings. A file is read once.

    Raises:
        ConfigError: The prompt file cannot be read.
    """
    if policy.summary is None:
        return ""
    row = getattr(settings.compaction.strategies, policy.name)
    named = row.prompt_file or settings.summary.prompt_file
    text = _text(named, policy.summary.prompt).replace("{tokens}", str(policy.summary.tokens))
    own = settings.summary.instructions if row.instructions is None else row.instructions
    added = own.strip()
    return f"{text.rstrip()}\n\n{added}\n" if added else text


def check_instructions(config: Config) -> None:
    """Read every prompt file that the configuration names.

    Raises:
        ConfigError: One of them cannot be read.
    """
    for model in ("", *config.models):
        settings = for_model(config, model)
        for name in STRATEGIES:
            instructions(settings, policy_for(settings, name))

"""The policy that holds for a request: built once for each model glob and strategy, then looked up."""

from functools import lru_cache

from compaction_proxy.config.config import ModelSettings
from compaction_proxy.config.policy import row_for
from compaction_proxy.core.strategies import Policy


@lru_cache(maxsize=512)
def policy_for(settings: ModelSettings, strategy: str | None = None) -> Policy:
    """A strategy's row with what the configuration changes of it.

    Args:
        settings: What is configured for the model; compared by identity.
        strategy: Name of the row that a request asked for; None: the configured one.

    Raises:
        KeyError: There is no strategy of that name.
    """
    return row_for(settings, strategy)

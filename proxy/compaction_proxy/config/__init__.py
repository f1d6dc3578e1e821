"""The configuration: what can be set, where it is read from, and what holds for a model."""

from compaction_proxy.config.config import Config, ModelSettings, for_model
from compaction_proxy.config.loader import Loaded, load

__all__ = ["Config", "Loaded", "ModelSettings", "for_model", "load"]

"""The configuration: what can be set, where it is read from, and what holds for a model."""

from compaction_proxy.config.config import Config, ModelSettings, get_model_settings
from compaction_proxy.config.loader import LoadedConfig, load_config

__all__ = ["Config", "LoadedConfig", "ModelSettings", "get_model_settings", "load_config"]

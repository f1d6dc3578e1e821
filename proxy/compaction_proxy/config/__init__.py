"""The configuration: its keys, the sources that it is read from, and the settings for one model."""

from compaction_proxy.config.config import Config, ModelSettings, get_model_settings
from compaction_proxy.config.loader import LoadedConfig, load_config

__all__ = ["Config", "LoadedConfig", "ModelSettings", "get_model_settings", "load_config"]

"""The configuration: what can be set, where it is read from, and what holds for a model."""

from proxy.config.model import Config, ModelSettings, for_model
from proxy.config.sources import Loaded, load

__all__ = ["Config", "Loaded", "ModelSettings", "for_model", "load"]

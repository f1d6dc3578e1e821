"""The section `archive`: how much of what was removed is kept."""

from pydantic import BaseModel

from compaction_proxy.config.types import STRICT, Number

_MEGABYTE = 1_000_000


class ArchiveSection(BaseModel):
    """How much of what was removed is kept; beyond that the oldest rounds' goes first."""

    model_config = STRICT
    conversation_mb: Number = 16
    """Megabytes of text of one conversation with its branches, before compression; 0: no bound."""
    tenant_mb: Number = 512
    """Megabytes of text of all that a tenant has, likewise; looked at once a minute. 0: no bound."""

    @property
    def conversation_bytes(self) -> int:
        """`conversation_mb` in bytes."""
        return self.conversation_mb * _MEGABYTE

    @property
    def tenant_bytes(self) -> int:
        """`tenant_mb` in bytes."""
        return self.tenant_mb * _MEGABYTE

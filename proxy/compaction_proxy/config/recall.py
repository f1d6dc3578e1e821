"""The section `recall`: who gets at what was removed, and how much of it."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from compaction_proxy.config.types import STRICT, no_boolean

Hops = Annotated[int, BeforeValidator(no_boolean), Field(ge=1, le=16)]
RecalledTokens = Annotated[int, BeforeValidator(no_boolean), Field(ge=50, le=2_000)]
Share = Annotated[float, BeforeValidator(no_boolean), Field(ge=0, le=1, allow_inf_nan=False)]


class RecallSection(BaseModel):
    """How the model gets at what was removed."""

    model_config = STRICT
    tool: Literal["none", "inject", "always"] = "none"
    """Offers the model a search of what was removed, once something was (`inject`) or `always`."""
    max_hops: Hops = 4
    """How often, 1 to 16, one answer may go on after searches; up to 8 of them are run each time."""
    auto: Literal["none", "inject"] = "none"
    """`inject` places what matches the latest user message right before it."""
    auto_tokens: RecalledTokens = 500
    """Tokens that what `auto` places may take, 50 to 2,000."""
    auto_score: Share = 0.25
    """How well a passage must match for `auto`, 0 to 1; the lower, the more is beside the point."""

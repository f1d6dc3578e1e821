"""What a model costs where the configuration says so: it beats the table of prices."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, field_validator

from compaction_proxy.config.types import STRICT, Positive, no_boolean
from compaction_proxy.core.cost.price import Price, Tier

# A dollar a token. Sums of what is far beyond are no numbers any more, and JSON has no way to write them.
MAX_DOLLARS = 1_000_000
Dollars = Annotated[float, BeforeValidator(no_boolean), Field(ge=0, le=MAX_DOLLARS)]
SOURCE = "configuration"


class SurchargeSection(BaseModel):
    """What requests cost that are larger than a certain size; it holds for all of their tokens."""

    model_config = STRICT
    above_tokens: Positive
    """Input tokens above which a request costs more."""
    input: Dollars
    """Dollars for a million input tokens; more than without the surcharge."""
    cached: Dollars | None = None
    """The same for tokens that the provider had cached; null: as many times more as `input`."""
    cache_write: Dollars | None = None
    """The same for tokens that it puts into its cache; null: as many times more as `input`."""
    output: Dollars | None = None
    """Dollars for a million output tokens; null: no more than without."""


class PricesSection(BaseModel):
    """What a model costs, in dollars for a million tokens."""

    model_config = STRICT
    input: Dollars
    """Dollars for a million input tokens."""
    cached: Dollars | None = None
    """The same for tokens that the provider had cached; null: as `input`."""
    cache_write: Dollars | None = None
    """The same for tokens that it puts into its cache; null: as `input`."""
    output: Dollars
    """Dollars for a million output tokens."""
    surcharge: SurchargeSection | None = None
    """`above_tokens`, `input`, `cached`, `cache_write`, `output` of larger requests; null: none."""

    @field_validator("surcharge")
    @classmethod
    def _more(cls, surcharge: SurchargeSection | None, info: ValidationInfo) -> SurchargeSection | None:
        """A surcharge costs more."""
        without = info.data.get("input")
        if surcharge is not None and without is not None and surcharge.input <= without:
            raise ValueError(f"its input costs {surcharge.input:g}, which is not above {without:g}")
        return surcharge

    def price(self) -> Price:
        """The prices as the core has them."""
        return Price(tuple(self._tiers()), SOURCE)

    def _tiers(self) -> list[Tier]:
        cached, written = (self.input if each is None else each for each in (self.cached, self.cache_write))
        least = Tier(0, self.input, cached, written, self.output)
        more = self.surcharge
        if more is None:
            return [least]
        times = more.input / self.input if self.input else 1.0
        return [
            least,
            Tier(
                above=more.above_tokens,
                input=more.input,
                cached=cached * times if more.cached is None else more.cached,
                cache_write=written * times if more.cache_write is None else more.cache_write,
                output=self.output if more.output is None else more.output,
            ),
        ]

"""An attribute that is computed once for each object."""

from compaction_proxy.support.cached import cached_attribute


class Square:
    def __init__(self, side: int) -> None:
        self.side = side
        self.computed = 0

    @cached_attribute
    def area(self) -> int:
        """The area."""
        self.computed += 1
        return self.side**2


def test_the_value_is_computed_once_for_each_object() -> None:
    first, second = Square(2), Square(3)

    assert (first.area, first.area, second.area) == (4, 4, 9)
    assert (first.computed, second.computed) == (1, 1)


def test_the_value_is_not_computed_before_it_is_read() -> None:
    assert Square(2).computed == 0

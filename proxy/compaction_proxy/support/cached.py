"""Values that follow from an object that does not change, worked out when they are asked for, and once."""

from collections.abc import Callable
from typing import Generic, TypeVar, overload

Instance = TypeVar("Instance")
Value = TypeVar("Value")


class cached_attribute(Generic[Instance, Value]):  # noqa: N801 - used as a decorator
    """As `functools.cached_property`, without the lock that it takes up to Python 3.11.

    That lock costs more than most of what is kept. Without it two threads may both work a value out. This
    goes when 3.11 is no longer supported.

    Args:
        work: Gives the value.
    """

    def __init__(self, work: Callable[[Instance], Value]) -> None:
        self._work = work
        self._name = work.__name__
        self.__doc__ = work.__doc__

    @overload
    def __get__(self, instance: None, owner: type[Instance]) -> "cached_attribute[Instance, Value]": ...
    @overload
    def __get__(self, instance: Instance, owner: type[Instance]) -> Value: ...

    def __get__(
        self, instance: Instance | None, owner: type[Instance]
    ) -> "Value | cached_attribute[Instance, Value]":
        """The value, which from now on stands in the object itself."""
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._work(instance)
        return value

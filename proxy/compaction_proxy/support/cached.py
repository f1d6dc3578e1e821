"""Computes an attribute of an unchanging object once, when it is first read."""

from collections.abc import Callable
from typing import Generic, TypeVar

Instance = TypeVar("Instance")
Value = TypeVar("Value")


class cached_attribute(Generic[Instance, Value]):  # noqa: N801 - used as a decorator
    """Works like `functools.cached_property`, but without the lock that Python up to 3.11 takes there.

    The lock costs more than computing most of the cached values. Without it, two threads may both compute a
    value. This class can be removed when Python 3.11 is no longer supported.

    Args:
        work: Computes the value.
    """

    def __init__(self, work: Callable[[Instance], Value]) -> None:
        self._work = work
        self._name = work.__name__
        self.__doc__ = work.__doc__

    def __get__(self, instance: Instance, owner: type[Instance]) -> Value:
        """Returns the value. The first read stores it in the object itself."""
        value = instance.__dict__[self._name] = self._work(instance)
        return value

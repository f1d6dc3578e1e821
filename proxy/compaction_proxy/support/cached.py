"""Defines a decorator for attributes that are computed when they are first read."""

from collections.abc import Callable
from typing import Generic, TypeVar

Instance = TypeVar("Instance")
Value = TypeVar("Value")


class cached_attribute(Generic[Instance, Value]):  # noqa: N801 - used as a decorator
    """A decorator that computes an attribute when it is first read, and keeps the value in the instance.

    The decorator works like `functools.cached_property`, but takes no lock. In Python 3.11, `cached_property`
    takes a lock, which costs more time than the computation of most cached values. Without a lock, two
    threads may each compute the value. Use the decorator only if each computation gives the same value. This
    class can be removed when Python 3.11 is no longer supported.

    Args:
        work: The decorated method, which computes the value.
    """

    def __init__(self, work: Callable[[Instance], Value]) -> None:
        self._work = work
        self._name = work.__name__
        self.__doc__ = work.__doc__

    def __get__(self, instance: Instance, owner: type[Instance]) -> Value:
        """Computes the value and stores it in the instance.

        Later reads find the value in the instance, so Python does not call this method again.
        """
        value = instance.__dict__[self._name] = self._work(instance)
        return value

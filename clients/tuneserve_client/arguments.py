"""Errors about the arguments of a call, in the names that the caller used.

A wrong argument raises ``TypeError`` or ``ValueError`` with the method, which the synchronous and
asynchronous classes share. For an unknown keyword, the error suggests the nearest known one.
"""

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from tuneserve_client.hints import hint

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

_CLOSE = 0.8
"""The similarity from which a free keyword counts as a misspelt parameter."""


def checks_arguments(kind: C) -> C:
    """Have every public method of the class check its arguments (a class decorator)."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(kind, name, checked(method))
    return kind


def checked(method: F) -> F:
    """Return the method with a check of its arguments before each call.

    Pydantic's ``ValidationError`` becomes a ``ValueError`` that names the argument.
    """
    signature = inspect.signature(method)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _arguments(signature, method.__name__, args, kwargs):
            return method(*args, **kwargs)

    @wraps(method)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        with _arguments(signature, method.__name__, args, kwargs):
            return await method(*args, **kwargs)

    return cast(F, call_async if inspect.iscoroutinefunction(method) else call)


@contextmanager
def _arguments(
    signature: inspect.Signature, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    where = f"{name}()"
    bound = _bound(signature, where, args, kwargs)
    try:
        yield
    except ValidationError as error:
        told = [_told(each, bound) for each in error.errors(include_url=False)]
        raise ValueError(f"{where}: {'; '.join(told)}") from None


def _bound(
    signature: inspect.Signature, where: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments by name. Raises ``TypeError`` if they do not fit the signature."""
    kinds = {each.name: each.kind for each in signature.parameters.values()}
    free = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    known = [name for name, kind in list(kinds.items())[1:] if kind not in free]
    is_free = inspect.Parameter.VAR_KEYWORD in kinds.values()
    for name in kwargs:
        if name not in known and (not is_free or difflib.get_close_matches(name, known, 1, _CLOSE)):
            raise TypeError(f"{where} has no argument {name!r}; {hint(name, known)}")
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{where}: {error}; it takes {', '.join(known) or 'none'}") from None


def _told(problem: Any, bound: Mapping[str, Any]) -> str:
    """Return what is wrong with a field, under the name of the argument that holds its value."""
    value = problem["input"]
    name = ".".join(map(str, problem["loc"]))
    if name not in bound:  # the wire has another name for it
        name = next((each for each, given in bound.items() if given is value), name)
    return f"{name} is {value!r}; {problem['msg'][:1].lower()}{problem['msg'][1:]}"

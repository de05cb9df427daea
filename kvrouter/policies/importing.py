"""Loads the class of `--router-policy`, and checks it at start-up, before a request depends on it.

    package.module:Class   is imported, also from the directory in which kvrouter was started
    NAME                   is an entry point in the group `kvrouter.policies` of an installed package

The class must define `choose`. Other methods of `Policy` that it defines are called, so they must fit, too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from kvrouter.core.routing.policy import Policy
from kvrouter.errors import ConfigError
from kvrouter.policies.guarded import END_ARGUMENTS, GuardedPolicy, takes

GROUP = "kvrouter.policies"

# The methods that kvrouter calls, and their number of arguments.
_ARGUMENTS = {
    "choose": 2,
    "on_workers": 1,
    "on_request_routed": 3,
    "on_request_end": END_ARGUMENTS,
    "on_worker_removed": 1,
    "refresh": 0,
    "close": 0,
}


@dataclass(slots=True)
class GuardedPolicies:
    """Makes the policies of one class, one for each pool."""

    name: str
    make: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # made by `begin`, and used for the first pool: so the constructor runs exactly once for each pool
    _first: GuardedPolicy | None = None

    def begin(self) -> None:
        """Make the first policy now, so that start-up fails if its constructor does. Raises ConfigError."""
        self._first = self._made()

    def __call__(self) -> GuardedPolicy:
        """A policy for one more pool. If its constructor fails now, one that always falls back."""
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            return self._made()
        except ConfigError as error:
            broken = GuardedPolicy(Policy(), self.name)  # its `choose` raises, so the guard decides
            broken.note("__init__", str(error))
            return broken

    def _made(self) -> GuardedPolicy:
        try:
            policy = self.make(**self.arguments)
        except Exception as error:
            raise ConfigError(
                f"policy {self.name} could not be made: {type(error).__name__}: {error}"
            ) from error
        return guarded(policy, self.name)


def load_custom_policy(name: str, arguments: Sequence[str] = ()) -> GuardedPolicies:
    """The class that `name` names; `arguments` are KEY=VALUE for its constructor. Raises ConfigError."""
    found = _imported(name) if ":" in name else _entry_point(name)
    if not isinstance(found, type):
        raise ConfigError(f"policy {name}: {found!r} is not a class")
    _check_methods(found, name)
    return GuardedPolicies(name, found, _constructor_arguments(found, name, arguments))


def guarded(policy: object, name: str) -> GuardedPolicy:
    """A guard around an object with a `choose`. Raises ConfigError if a method or setting does not fit."""
    _check_methods(policy, name)
    refresh_s = getattr(policy, "refresh_s", 0.0)
    if not isinstance(refresh_s, int | float) or not refresh_s >= 0:  # `not >=`: also False for NaN
        raise ConfigError(f"policy {name}: refresh_s is {refresh_s!r}; use a number of seconds")
    if _is_defined(policy, "refresh") and not refresh_s:
        raise ConfigError(f"policy {name} has a refresh but no interval: set one, as in refresh_s = 1.0")
    return GuardedPolicy(policy, name)  # type: ignore[arg-type]  # as much of a Policy as is called


def _imported(name: str) -> object:
    module_name, _, path = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # `python -m` has it, a console script does not
    try:
        found: object = import_module(module_name)  # the module runs, and may raise anything
    except Exception as error:
        raise ConfigError(f"policy {name}: {_why_not_imported(module_name, error)}") from error
    module = found
    for part in path.split("."):
        if not hasattr(found, part):
            there = ", ".join(_with_choose(module)) or "none with a choose method"
            raise ConfigError(f"policy {name}: {module_name} has no {path}; its classes: {there}")
        found = getattr(found, part)
    return found


def _why_not_imported(module_name: str, error: Exception) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{module_name}.".startswith(f"{missing}."):  # it or its package, not what it imports
        return f"no module {missing!r}; install it, or start kvrouter in the directory that has it"
    if not module_name or module_name.startswith("."):
        return "write package.module:Class"
    return f"importing {module_name} failed: {type(error).__name__}: {error}"


def _with_choose(module: object) -> list[str]:
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return [name for name, value in classes.items() if _is_defined(value, "choose")]


def _entry_point(name: str) -> object:
    installed: dict[str, EntryPoint] = {point.name: point for point in entry_points(group=GROUP)}
    if name not in installed:
        known = ", ".join(sorted(installed)) or "none"
        raise ConfigError(
            f"policy {name!r} is not an entry point in the group {GROUP} (installed: {known});"
            " for a class, write package.module:Class"
        )
    try:
        return installed[name].load()
    except Exception as error:
        raise ConfigError(f"policy {name}: {type(error).__name__}: {error}") from error


def _is_defined(policy: object, method: str) -> bool:
    """Whether it defines the method itself, instead of inheriting it from Policy."""
    owner = policy if isinstance(policy, type) else type(policy)
    found = getattr(owner, method, None)
    return found is not None and found is not getattr(Policy, method)


def _check_methods(policy: object, name: str) -> None:
    """Raise ConfigError if a class or object has no `choose`, or a method that kvrouter cannot call."""
    if not _is_defined(policy, "choose"):
        raise ConfigError(f"policy {name} has no choose(self, request, candidates)")
    for method, count in _ARGUMENTS.items():
        if _is_defined(policy, method):
            _check_method(policy if isinstance(policy, type) else type(policy), method, count, name)


def _check_method(owner: type, method: str, count: int, name: str) -> None:
    function = getattr(owner, method)
    if not callable(function):
        raise ConfigError(f"policy {name}: {method} is not a method")
    if inspect.iscoroutinefunction(function) != (method == "refresh"):
        remedy = "async def" if method == "refresh" else "a plain def; what waits belongs in refresh"
        raise ConfigError(f"policy {name}: {method} has to be {remedy}")
    is_static = isinstance(inspect.getattr_static(owner, method), staticmethod | classmethod)
    counts = [count, count - 1] if method == "on_request_end" else [count]
    if not any(takes(function, each if is_static else each + 1) for each in counts):  # + 1: self
        shown = str(inspect.signature(getattr(Policy, method))).partition(" ->")[0].replace("'", "")
        raise ConfigError(f"policy {name}: write {method}{shown}")


def _constructor_arguments(made: type, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    # of __init__, if it has one: of a class that also has __new__ Python's versions take either
    maker = made.__init__ if inspect.isfunction(made.__init__) else made  # type: ignore[misc]
    try:
        signature = inspect.signature(maker, eval_str=True)
    except Exception:  # written in C, or annotated with names that only a type checker imports
        signature = inspect.signature(maker)
    if maker is not made:
        _, *parameters = signature.parameters.values()
        signature = signature.replace(parameters=parameters)
    known = {key: one for key, one in signature.parameters.items() if one.kind not in {one.VAR_POSITIONAL}}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
    given: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise ConfigError(f"--router-policy-arg {argument!r}: write KEY=VALUE")
        if key not in known and not takes_all:
            raise ConfigError(f"policy {name} takes no {key!r}; it takes: {', '.join(known) or 'nothing'}")
        given[key] = _converted(text, known.get(key), f"--router-policy-arg {argument!r}")
    # now instead of in the constructor: the message can name the missing argument and its flag
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ConfigError(f"policy {name}: {error}; give it with --router-policy-arg KEY=VALUE") from None
    return given


def _made_of(type_: Callable[[str], Any], text: str) -> Any:
    """Make a value of a type that msgspec does not know, such as a Path, from its text."""
    return type_(text)


def _converted(text: str, parameter: inspect.Parameter | None, shown: str) -> Any:
    """The text converted to the parameter's annotated type, else to the type of its default."""
    if parameter is None:
        return text
    type_ = parameter.annotation
    if type_ is parameter.empty or isinstance(type_, str):  # a text: names that are not known when it runs
        default = parameter.default
        type_ = str if default is parameter.empty or default is None else type(default)
    try:
        return msgspec.convert(text, type_, strict=False, dec_hook=_made_of)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{shown}: {error}") from None
    except TypeError:  # a type that cannot be made from text: the constructor gets the text
        return text

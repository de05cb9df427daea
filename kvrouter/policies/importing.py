"""Finds the class of `--router-policy`, and says what is wrong with it before a request does.

    package.module:Class   imported; the directory where kvrouter was started counts
    NAME                   an entry point in the group `kvrouter.policies` of an installed package

A class needs a `choose`; whatever else of `Policy` it defines is called, so that must fit as well.
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
from kvrouter.policies.guarded import GuardedPolicy

GROUP = "kvrouter.policies"
_ARGUMENTS = {
    "choose": 2,
    "on_workers": 1,
    "on_request_routed": 3,
    "on_worker_removed": 1,
    "refresh": 0,
    "close": 0,
}
"""The methods that are called, and with how many arguments."""


@dataclass(slots=True)
class GuardedPolicies:
    """Makes the policies of one class: each pool gets its own."""

    name: str
    make: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    _first: GuardedPolicy | None = None

    def begin(self) -> None:
        """Make the first now, so that a constructor that fails is seen at the start. Raises ConfigError."""
        self._first = self._made()

    def __call__(self) -> GuardedPolicy:
        """One more. If that fails, now that requests are served, one that always falls back."""
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            return self._made()
        except ConfigError as error:
            broken = GuardedPolicy(Policy(), self.name)
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
    """The class that `name` stands for; `arguments` are KEY=VALUE for its constructor. Raises ConfigError."""
    found = _imported(name) if ":" in name else _entry_point(name)
    if not isinstance(found, type):
        raise ConfigError(f"policy {name}: that is {found!r}, and no class")
    _check_methods(found, name)
    return GuardedPolicies(name, found, _constructor_arguments(found, name, arguments))


def guarded(policy: object, name: str) -> GuardedPolicy:
    """An object that has a `choose`, ready for the router. Raises ConfigError if it does not fit."""
    _check_methods(policy, name)
    refresh_s = getattr(policy, "refresh_s", 0.0)
    if not isinstance(refresh_s, int | float) or not refresh_s >= 0:  # NaN is neither
        raise ConfigError(f"policy {name}: refresh_s is {refresh_s!r}; use seconds")
    if _is_defined(policy, "refresh") and not refresh_s:
        raise ConfigError(f"policy {name} has a refresh: say how often, as in refresh_s = 1.0")
    return GuardedPolicy(policy, name)  # type: ignore[arg-type]  # as much of a Policy as is called


def _imported(name: str) -> object:
    module_name, _, path = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it; a console script does not
    try:
        found: object = import_module(module_name)
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
    if missing and f"{module_name}.".startswith(f"{missing}."):
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
        known = ", ".join(sorted(installed)) or "none is installed"
        raise ConfigError(
            f"policy {name!r} is no entry point in the group {GROUP} ({known}); or write package.module:Class"
        )
    try:
        return installed[name].load()
    except Exception as error:
        raise ConfigError(f"policy {name}: {type(error).__name__}: {error}") from error


def _is_defined(policy: object, method: str) -> bool:
    """Whether it has the method, other than from Policy itself."""
    owner = policy if isinstance(policy, type) else type(policy)
    found = getattr(owner, method, None)
    return found is not None and found is not getattr(Policy, method)


def _check_methods(policy: object, name: str) -> None:
    """Raise ConfigError for a method that is missing or could not be called; of a class or an object."""
    if not _is_defined(policy, "choose"):
        raise ConfigError(f"policy {name} has no choose(self, request, candidates)")
    for method, count in _ARGUMENTS.items():
        if _is_defined(policy, method):
            _check_method(policy if isinstance(policy, type) else type(policy), method, count, name)


def _check_method(owner: type, method: str, count: int, name: str) -> None:
    function = getattr(owner, method)
    if not callable(function):
        raise ConfigError(f"policy {name}: {method} is no method")
    if inspect.iscoroutinefunction(function) != (method == "refresh"):
        remedy = "make it async" if method == "refresh" else "make it a plain def; what waits goes to refresh"
        raise ConfigError(f"policy {name}: {method} is called the other way: {remedy}")
    is_static = isinstance(inspect.getattr_static(owner, method), staticmethod | classmethod)
    try:
        inspect.signature(function).bind(*[None] * (count if is_static else count + 1))
    except TypeError:
        shown = str(inspect.signature(getattr(Policy, method))).partition(" ->")[0].replace("'", "")
        raise ConfigError(f"policy {name}: write {method}{shown}") from None


def _constructor_arguments(made: type, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    try:
        signature = inspect.signature(made, eval_str=True)
    except Exception:  # built in C, or annotated with names that only a type checker imports
        signature = inspect.signature(made)
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
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ConfigError(f"policy {name}: {error}; give it with --router-policy-arg KEY=VALUE") from None
    return given


def _made_of(type_: Callable[[str], Any], text: str) -> Any:
    """A type that msgspec does not know, such as a Path, is made of its text."""
    return type_(text)


def _converted(text: str, parameter: inspect.Parameter | None, shown: str) -> Any:
    """The text as the type that the parameter is annotated with, else as that of its default."""
    if parameter is None:
        return text
    type_ = parameter.annotation
    if type_ is parameter.empty or isinstance(type_, str):
        default = parameter.default
        type_ = str if default is parameter.empty or default is None else type(default)
    try:
        return msgspec.convert(text, type_, strict=False, dec_hook=_made_of)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{shown}: {error}") from None
    except TypeError:  # no type that a text can become
        return text

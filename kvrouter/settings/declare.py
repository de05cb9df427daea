"""What a setting is: name, type, unit, default, help. Pure: no environment, no file, no flag parser.

A dataclass of settings derives from `Settings`. Each field `name: type = setting(default, "help", …)` is a
setting; a field whose type is another such dataclass holds the settings of that class; other fields are not
settings. A type is str, int, float, bool, Path or a Literal, or a union of these, or None besides; or a tuple
of one of these, for what may be given several times.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_args, get_origin

PREFIX = "KVROUTER_"
MIB = 1024 * 1024
INTERRUPTED = 130
"""The exit status after Ctrl-C while a command is not yet ready for signals, as in a shell."""
SWITCHES = {
    "true": True,
    "false": False,
    "on": True,
    "off": False,
    "yes": True,
    "no": False,
    "1": True,
    "0": False,
}
# From :// to the last @ before the next ://, as a password may contain any of / @ and a comma. Or before @
# in a URL whose :// was forgotten.
_PASSWORD = re.compile(r"""(?<=://)(?:(?!://)\S)*@|(?<![^\s'"=,])[^\s'"=,:@/]+:(?!//)(?:(?!://)\S)*@""")
_hints = functools.cache(typing.get_type_hints)  # they are slow to resolve


class Settings:
    """Base of the dataclasses of settings."""

    __slots__ = ()

    heading: ClassVar[str] = "Settings"
    """Of its settings in help."""

    def checked(self) -> Self:
        """Itself, perhaps with values worked out from others. Raises ConfigError if two do not fit together.

        Called once after reading, first for nested classes.
        """
        return self


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class Implied:
    """A default for another setting, from the file that a setting names.

    `where`: the key in that file. `is_fact`: both describe the same thing, so two values are a contradiction.
    """

    name: str
    text: str = field(repr=False)  # it may be a secret
    where: str
    is_fact: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """The metadata of a field, made by `setting`. Of numbers, type and bounds say what they may be."""

    help: str
    name: str = ""
    """Of the flag, without dashes; empty: the field's name."""
    metavar: str = ""
    """Stands for the value in help; empty: N, X, FILE, TEXT or the choices."""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    """For choices that are known only at run time; else the type is a Literal."""
    read: Callable[[str], Any] | None = None
    """Turns a text into the value. Raises ValueError or ConfigError with what it may be."""
    text: Callable[[Any], str] | None = None
    """The inverse of `read`, if str() is not."""
    is_repeated: bool | None = None
    """Whether it may be given several times, for a tuple; None: if the type is a tuple and `read` is None."""
    old: tuple[str, ...] = ()
    """Other spellings of the flag that work, with their dashes; one that begins with --no- switches off."""
    variable: str = ""
    """An environment variable that is read after KVROUTER_…"""
    former: Mapping[str, str] = field(default_factory=dict)
    """Choices that are gone, with what to use instead."""
    retired: str = ""
    """Of a setting that does nothing any more: what to do instead. Whoever gives it is warned."""
    since: str = "0.1"
    default_text: str = ""
    """Describes the default in help if it is worked out later."""
    heading: str = ""
    """In help, instead of that of the class."""
    is_top: bool = False
    """Whether it is one of the few that --help shows."""
    is_hidden: bool = False
    """Whether it is for child processes only."""
    is_positional: bool = False
    is_secret: bool = False
    """Whether the value itself, not a file with it, must not be printed."""
    reloadable: bool = False
    """Whether it can change while the process runs."""
    implies: Callable[[Any], Iterable[Implied]] | None = None
    """Of a setting that names a file: the defaults in it. Raises ConfigError."""


def setting(default: Any, help: str, **options: Any) -> Any:  # noqa: A002  # as in argparse
    """A field of a dataclass with the metadata of a `Setting`. `default` MISSING: it must be given."""
    made = Setting(help, **options)
    return field(default=default, repr=not made.is_secret, metadata={Setting: made})


@dataclass(frozen=True, slots=True)
class Declared:
    """A setting of a command. `path`: the fields that lead to it through nested dataclasses."""

    path: tuple[str, ...]
    name: str
    type: Any
    default: Any
    heading: str
    setting: Setting

    @property
    def flag(self) -> str:
        return self.name if self.setting.is_positional else f"--{self.name}"

    @property
    def parameter(self) -> str:
        """As a name of Python."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return variable_of(self.name)

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def is_switch(self) -> bool:
        return bool in _kinds(self.type)

    @property
    def is_list(self) -> bool:
        """Whether it may be given several times."""
        setting = self.setting
        if setting.is_repeated is not None:
            return setting.is_repeated
        return get_origin(self.type) is tuple and setting.read is None

    @property
    def choices(self) -> tuple[str, ...]:
        literals = (get_args(kind) for kind in self._kinds if get_origin(kind) is Literal)
        return self.setting.choices or tuple(text for texts in literals for text in texts)

    @property
    def _kinds(self) -> tuple[Any, ...]:
        """The types of one value."""
        return _kinds(get_args(self.type)[0] if self.is_list else self.type)

    @property
    def metavar(self) -> str:
        """What stands for the value in help."""
        if self.is_switch:
            return ""
        kinds = self._kinds
        number = "N" if int in kinds else "X" if float in kinds else ""
        other = "" if self.choices or number else "FILE" if Path in kinds else "TEXT"
        return self.setting.metavar or "|".join(filter(None, (*self.choices, number, other)))

    @property
    def spellings(self) -> set[str]:
        """All flags that set it."""
        return {self.flag, *self.setting.old} | ({f"--no-{self.name}"} if self.is_switch else set())

    def read(self, text: str) -> Any:
        """The value of a text. Raises ValueError with what it may be."""
        setting, kinds = self.setting, self._kinds
        if setting.read is not None:
            return setting.read(text)
        if self.is_switch and text.lower() in SWITCHES:
            return SWITCHES[text.lower()]
        if text in self.choices:
            return text
        if (value := number(text, is_whole=int in kinds)) is not None and {int, float} & {*kinds}:
            if self._is_within_bounds(value):
                return value
        elif Path in kinds and text:
            return Path(text)
        elif str in kinds and not self.choices:
            return text
        raise ValueError(self.problem(text))

    def problem(self, text: str) -> str:
        """What is wrong with a text that `read` does not take."""
        if text in self.setting.former:
            return f"removed; {self.setting.former[text]}"
        return f"must be {self._expected()}{did_you_mean(text, self.choices)}"

    def text(self, value: Any) -> str:
        """A value as `read` takes it; for one item of a list."""
        if self.setting.text is not None:
            return self.setting.text(value)
        if isinstance(value, bool):
            return "on" if value else "off"
        return f"{value:.15g}" if isinstance(value, float) else str(value)

    def shown(self, value: Any) -> str:
        """A value for people, without secrets; empty if it is not set."""
        if value is None or (self.is_required and value is dataclasses.MISSING):
            return ""
        if self.setting.is_secret:
            return "(secret)"
        return without_password(" ".join(map(self.text, value)) if self.is_list else self.text(value))

    def flags(self, value: Any) -> list[str]:
        """The flags from which another process reads this value; none for None."""
        if self.is_switch and value is not None:
            return [self.flag if value else f"--no-{self.name}"]
        if self.is_list:
            return [f"{self.flag}={self.text(item)}" for item in value]  # =: values may begin with a dash
        return [] if value is None else [f"{self.flag}={self.text(value)}"]

    def value_in(self, settings: object) -> Any:
        for name in self.path:
            settings = getattr(settings, name)
        return settings

    def _is_within_bounds(self, value: float) -> bool:
        least, most, above = self.setting.least, self.setting.most, self.setting.above
        return (
            (least is None or value >= least)
            and (most is None or value <= most)
            and (above is None or value > above)
        )

    def _expected(self) -> str:
        """What a value may be, for messages."""
        kinds, parts = self._kinds, [*self.choices]
        if {int, float} & {*kinds}:
            parts.append(("a whole number" if int in kinds else "a number") + self._bounds())
        if Path in kinds:
            parts.append("a path")
        if self.is_switch:
            parts += ["on", "off"]
        return " or ".join(filter(None, (", ".join(parts[:-1]), parts[-1]))) if parts else "a text"

    def _bounds(self) -> str:
        least, most, above = (
            _short(bound) if bound is not None else ""
            for bound in (self.setting.least, self.setting.most, self.setting.above)
        )
        if least and most:
            return f" from {least} to {most}"
        parts = [
            f"above {above}" if above else "",
            f"at least {least}" if least else "",
            f"at most {most}" if most else "",
        ]
        text = " and ".join(filter(None, parts))
        if not text:
            return ""
        return f" {text}" if above else f" of {text}"


@dataclass(frozen=True, slots=True)
class Command(Generic[S]):
    """A command and its settings class.

    `tables`: further tables of the config file that it reads, after its own and before [shared]. `left_out`:
    settings of nested classes that it does not have, with what to use instead. `defaults`: where its defaults
    differ. `removed`: former flags, with what to use instead.
    """

    name: str
    kind: type[S]
    summary: str
    tables: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)

    def declared(self) -> list[Declared]:
        """Its settings, in the order of declaration."""
        return [
            dataclasses.replace(one, default=self.defaults[one.name]) if one.name in self.defaults else one
            for one in _declared_once(self.kind)  # type: ignore[arg-type]  # mypy asks its instances for a hash
            if one.name not in self.left_out
        ]

    def has(self, flag: str) -> bool:
        """Whether people may give this flag; also an old spelling, or `--no-…`."""
        return any(flag in one.spellings for one in self.declared() if not one.setting.is_hidden)


@functools.cache
def _declared_once(kind: type[Settings]) -> tuple[Declared, ...]:
    """Kept: type hints are slow to resolve, and several readers ask."""
    return tuple(declared(kind))


def variable_of(name: str) -> str:
    """The environment variable of the setting with this name."""
    return PREFIX + name.upper().replace("-", "_")


def declared(kind: type[Settings], path: tuple[str, ...] = (), heading: str = "") -> Iterator[Declared]:
    """The settings of a class and of the classes in it: its own before those that it inherits."""
    hints = typing.get_type_hints(kind)
    depth = {
        name: number
        for number, base in enumerate(reversed(kind.__mro__))
        for name in vars(base).get("__annotations__", ())
    }
    for one in sorted(dataclasses.fields(kind), key=lambda one: -depth[one.name]):  # type: ignore[arg-type]
        hint = hints[one.name]
        if isinstance(hint, type) and issubclass(hint, Settings):
            yield from declared(hint, (*path, one.name), heading)
        elif setting := one.metadata.get(Setting):
            default = one.default_factory() if callable(one.default_factory) else one.default
            owner = kind.__mro__[len(kind.__mro__) - 1 - depth[one.name]]
            group = setting.heading or vars(owner).get("heading", "") or heading or kind.heading
            name = setting.name or one.name.replace("_", "-")
            yield Declared((*path, one.name), name, hint, default, group, setting)


def built(kind: type[S], declarations: Iterable[Declared], values: Mapping[str, Any]) -> S:
    """The settings with these values by name, checked. Raises ConfigError."""
    tree: dict[str, Any] = {}
    for one in declarations:
        branch = tree
        for name in one.path[:-1]:
            branch = branch.setdefault(name, {})
        branch[one.path[-1]] = values[one.name]
    return _from_tree(kind, tree)


def _from_tree(kind: type[S], tree: Mapping[str, Any]) -> S:
    hints = _hints(kind).items()  # type: ignore[arg-type]  # as above
    nested = {name: hint for name, hint in hints if isinstance(hint, type) and issubclass(hint, Settings)}
    return kind(
        **{name: _from_tree(nested[name], value) if name in nested else value for name, value in tree.items()}
    ).checked()


def read_mib(text: str) -> int:
    """Bytes of a number of MiB. Raises ValueError."""
    value = number(text, is_whole=True)
    if value is None or value < 1:
        raise ValueError("must be a whole number of at least 1, in MiB")
    return int(value) * MIB


def mib(size_bytes: int) -> str:
    """The inverse of `read_mib`."""
    return str(size_bytes // MIB)


def did_you_mean(given: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message that names the nearest right one, if one is near. `prefix`: what all have."""
    names = {name.removeprefix(prefix).lower(): name for name in known}
    near = difflib.get_close_matches(given.removeprefix(prefix).lower(), names, 1)
    return f"; did you mean {names[near[0]]}?" if near else ""


def without_password(text: str) -> str:
    """A text without the user and password of the URLs in it."""
    return _PASSWORD.sub("", text)


def _kinds(type_: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return get_args(type_) if get_origin(type_) in {typing.Union, types.UnionType} else (type_,)


def number(text: str, *, is_whole: bool = False) -> float | None:
    """A finite number, or None. Python's own readers accept 1_000, spaces and nan, too."""
    if is_whole:
        return int(text) if text.isascii() and text.removeprefix("-").isdecimal() else None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None


def _short(bound: float) -> str:
    return f"{bound:.10g}"

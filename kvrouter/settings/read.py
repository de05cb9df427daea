"""Reads a command's settings: flags > KVROUTER_… > config file > implied > default.

words ──> cyclopts ──> tokens of flags ─┐
environment ─> variables, $NATS_URL ────┼─> values and sources ──> implied ──> settings, checked
--config FILE ─> [command], [shared] ───┘      (of the file of --router-config)
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import cyclopts
from cyclopts.utils import UNSET

from kvrouter.errors import ConfigError
from kvrouter.settings import pages
from kvrouter.settings.commands import MODULES, all_variables, commands_with
from kvrouter.settings.declare import (
    INTERRUPTED,
    PREFIX,
    Command,
    Declared,
    Settings,
    built,
    did_you_mean,
    variable_of,
    without_password,
)

S = TypeVar("S", bound=Settings)

WRONG_SETTINGS = 2
"""The exit status after a wrong setting."""
SHARED = "shared"
"""The table of the config file for settings of several commands."""
FLAG = "flag"
_MOST_FILE_BYTES = 1024 * 1024
_CONFIG = PREFIX + "CONFIG"
_OWN_FLAGS = ("--help", "--help-all", "--show-config", "--config")
# Kubernetes sets such variables for a Service named kvrouter: KVROUTER_PORT=tcp://10.0.0.1:8000.
_OF_A_SERVICE = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
_TESTS = PREFIX + "TEST_"
_FLAGS = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")


class PageAsked(Exception):  # noqa: N818  # an answer, not an error
    """--help, --help-all or --show-config: the command prints this text and does not run.

    `problem`: why it would not run with these settings; empty: it would.
    """

    def __init__(self, page: str, warnings: Sequence[str] = (), problem: str = "") -> None:
        super().__init__(page)
        self.warnings = warnings
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """The settings of one start. `sources`: where each value came from that is not the default.

    A source is `flag`, the name of a variable, the file with its table, as in `kvrouter.toml [frontend]`, or
    the flag of another file with the key in it, as in `--router-config kind`.
    """

    command: Command[S]
    settings: S
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    file: str
    """The config file; empty: none."""
    warnings: Sequence[str]
    words: Sequence[str]
    environ: Mapping[str, str]

    def reread(self) -> Loaded[S]:
        """The settings as the same flags, environment and file say now. Raises ConfigError."""
        return load(self.command, self.words, self.environ)

    def changes(self, later: Loaded[S]) -> list[Declared]:
        """The settings whose values differ in a later reading."""
        return [one for one in self.command.declared() if self.values[one.name] != later.values[one.name]]

    def passed_on(self, to: str, names: Collection[str]) -> list[str]:
        """The flags for a child, command `to`: what it will not find in its environment and tables."""
        found = {f"[{to}]", f"[{SHARED}]"}
        flags = [f"--config={self.file}"] if self.file != self.environ.get(_CONFIG, "") else []
        for one in self.command.declared():
            source = self.sources.get(one.name, "")
            # a source with " [" is a file with its table
            if one.name in names and (source == FLAG or (" [" in source and source.split()[-1] not in found)):
                flags += one.flags(self.values[one.name])
        return flags


def run(command: Command[S], arguments: Sequence[str] | None, main: Callable[[Loaded[S]], int]) -> int:
    """Read the settings and run `main`; returns the exit status. A wrong setting is one line on stderr."""
    try:
        loaded = load(command, arguments)
        is_json = loaded.values.get("log-format") == "json"
        for warning in loaded.warnings:
            _warn(command, warning, is_json=is_json)
        return main(loaded)
    except PageAsked as asked:
        return _print_page(command, asked)
    except ConfigError as error:
        return _print_problem(command, str(error), is_json=_asks_for_json(arguments))
    except KeyboardInterrupt:  # while its modules are loaded: where it serves, it catches signals
        return INTERRUPTED


def _print_page(command: Command[Any], asked: PageAsked) -> int:
    with contextlib.suppress(BrokenPipeError):  # | head
        sys.stdout.write(f"{asked}\n")
        sys.stdout.flush()
    for warning in asked.warnings:
        _warn(command, warning, is_json=False)
    return _print_problem(command, asked.problem) if asked.problem else 0


def _asks_for_json(arguments: Sequence[str] | None) -> bool:
    """Whether logs should be JSON, as far as it can be seen although the settings are wrong."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    in_words = "--log-format=json" in words or ("--log-format", "json") in pairwise(words)
    return in_words or os.environ.get(f"{PREFIX}LOG_FORMAT") == "json"


def _print_problem(command: Command[Any], problem: str, *, is_json: bool = False) -> int:
    line = " ".join(part.strip() for part in without_password(problem).splitlines())
    _print_line(command, line, {"event": "settings.wrong", "error": line, "level": "error"}, is_json=is_json)
    return WRONG_SETTINGS


def _warn(command: Command[Any], warning: str, *, is_json: bool) -> None:
    fact = {"event": "settings.ignored", "reason": warning, "level": "warning"}
    _print_line(command, warning, fact, is_json=is_json)


def _print_line(command: Command[Any], text: str, fact: dict[str, str], *, is_json: bool) -> None:
    """Logs are not set up yet: a line like theirs if they are JSON."""
    now = datetime.datetime.now(datetime.UTC).isoformat()
    line = json.dumps({**fact, "timestamp": now}) if is_json else f"kvrouter {command.name}: {text}"
    print(line, file=sys.stderr)  # noqa: T201


def load(
    command: Command[S], arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Loaded[S]:
    """Read flags, environment and file. Raises ConfigError, or PageAsked if the flags ask for a page."""
    words = sys.argv[1:] if arguments is None else arguments
    return _SettingsReader(command, tuple(words), os.environ if environ is None else environ).loaded()


class _SettingsReader(Generic[S]):
    def __init__(self, command: Command[S], words: Sequence[str], environ: Mapping[str, str]) -> None:
        self._command = command
        self._words = words
        self._environ = environ
        self._declared = {one.name: one for one in command.declared()}
        self._sources: dict[str, str] = {}

    def loaded(self) -> Loaded[S]:
        words = [self._renamed(word) for word in self._words]
        if {"--help", "-h", "--help-all"} & {*words}:
            raise PageAsked(pages.help_page(self._command, is_whole="--help-all" in words))
        given, words = _taken("--config", words)
        file = given or self._environ.get(_CONFIG, "")
        tables = _read_file(file, f"--config {file}" if given else f"{_CONFIG}={file}") if file else {}
        values = self._values([word for word in words if word != "--show-config"], tables, file)
        warnings, problem = [*self._unknown_variables(), *self._retired()], ""
        try:
            self._imply(values)
            settings = built(self._command.kind, self._declared.values(), values)
        except ConfigError as error:
            problem = f"{error}{self._origins(str(error))}"
            if "--show-config" not in words:
                raise ConfigError(problem) from None
        if "--show-config" in words:
            page = pages.config_page(self._command, values, self._sources)
            raise PageAsked(page, warnings, problem)
        return Loaded(
            command=self._command,
            settings=settings,
            values=values,
            sources=self._sources,
            file=file,
            warnings=warnings,
            words=self._words,
            environ=self._environ,
        )

    def _imply(self, values: dict[str, Any]) -> None:
        """Let the files that settings name give defaults. Raises ConfigError for a contradiction."""
        for file in self._declared.values():
            if file.setting.implies is None or values[file.name] is None:
                continue
            for implied in file.setting.implies(values[file.name]):
                one = self._declared.get(implied.name)
                if one is None:
                    continue  # this command does not have it
                shown = "(secret)" if one.setting.is_secret else implied.text
                where = f"{file.flag} {values[file.name]}: {implied.where} {shown}"
                value = _read(one, implied.text, where)
                value = (value,) if one.is_list else value
                if one.name not in self._sources:
                    values[one.name] = value
                    self._sources[one.name] = f"{file.flag} {implied.where}"
                elif implied.is_fact and values[one.name] != value:
                    given = f"{one.flag} {one.shown(values[one.name])}"
                    raise ConfigError(f"{where} contradicts {given}: they must be equal; drop one of them")

    def _origins(self, problem: str) -> str:
        """Where the settings that a message names as flags were given, if not as flags."""
        sources = {name: self._sources.get(name, FLAG) for name in _FLAGS.findall(problem)}
        given = [f"--{name} comes from {source}" for name, source in sources.items() if source != FLAG]
        return f" ({_joined(given)})" if given else ""

    def _renamed(self, word: str) -> str:
        """A word of the command line, with the flag's name of today."""
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").removeprefix("no-")
        instead = self._command.removed.get(name) or self._command.left_out.get(name)
        if flag.startswith("--") and instead and name not in self._declared:
            raise ConfigError(f"{flag}: {instead}")
        for one in self._declared.values():
            if flag in one.setting.old and not one.setting.is_positional:
                is_off = one.is_switch and flag.startswith("--no-")
                flag = f"--no-{one.name}" if is_off else one.flag
            if flag == one.flag and one.is_switch and equals:
                return one.flags(_read(one, value, f"{flag}={value}"))[0]
        return flag + equals + value

    def _values(self, words: Sequence[str], tables: Mapping[str, Any], file: str) -> dict[str, Any]:
        app = cyclopts.App(
            name=self._command.name,
            config=[self._variables, partial(self._tables, tables=tables, file=file)],
            help_flags=[],
            version_flags=[],
            result_action="return_value",
        )
        app.default(collecting(self._perhaps_given(words, tables)))
        try:
            given: dict[str, Any] = app(words, exit_on_error=False, print_error=False, verbose=False)
        except cyclopts.CycloptsError as error:
            raise ConfigError(self._message(error)) from None
        return {name: given.get(one.parameter, one.default) for name, one in self._declared.items()}

    def _perhaps_given(self, words: Sequence[str], tables: Mapping[str, Any]) -> list[Declared]:
        """The settings that cyclopts has to know: it takes 60 ms for all of a frontend's."""
        given = {re.split(r"[=.]", word)[0] for word in words}
        given |= {key for table in tables.values() for key in table}
        # cyclopts takes underscores and capitals, too
        names = {*self._environ, *given, *(name.replace("_", "-").lower() for name in given)}
        return [
            one
            for one in self._declared.values()
            if one.is_required
            or one.setting.is_positional
            or not names.isdisjoint({one.name, one.variable, one.setting.variable, *one.spellings})
        ]

    def _variables(self, _app: object, _commands: object, arguments: Iterable[Any]) -> None:
        """Give each argument without a flag the value of its variable; note where values come from."""
        for argument in arguments:
            one = self._declared[_name(argument)]
            if argument.tokens:
                self._sources[one.name] = FLAG
                continue
            for variable in (one.variable, one.setting.variable):
                text = self._environ.get(variable, "")
                if text and not one.setting.is_hidden and not _SERVICE_URL.match(text):
                    self._add(argument, text.split() if one.is_list else [text], f"{variable}={{}}", variable)
                    break

    def _tables(
        self,
        _app: object,
        _commands: object,
        arguments: Iterable[Any],
        *,
        tables: Mapping[str, Any],
        file: str,
    ) -> None:
        """Give each argument without a value that of its key in the file."""
        by_name = {_name(argument): argument for argument in arguments}
        for table in (self._command.name, *self._command.tables, SHARED):
            keys: dict[str, str] = {}
            for key, value in tables.get(table, {}).items():
                where, name = f"{file}: [{table}] {key}", key.replace("_", "-")
                if keys.setdefault(name, key) != key:
                    raise ConfigError(f"{where}: the same setting as {keys[name]}: give one of them")
                one = self._declared.get(name)
                if one is None or one.setting.is_hidden:
                    self._refuse_key(table, name, where)
                elif name not in self._sources:
                    self._add(
                        by_name[name], _texts(one, value, where), f"{where} = {{!r}}", f"{file} [{table}]"
                    )

    def _add(self, argument: Any, texts: Iterable[str], where: str, source: str) -> None:
        """`where`: how messages quote a value."""
        one = self._declared[_name(argument)]
        self._sources[one.name] = source
        for index, text in enumerate(texts):
            argument.append(
                cyclopts.Token(keyword=where, value=text, source=source, index=index if one.is_list else 0)
            )

    def _refuse_key(self, table: str, name: str, where: str) -> None:
        """Raise ConfigError for a key that no reader of this table knows."""
        if instead := self._command.removed.get(name):
            raise ConfigError(f"{where}: {instead}")
        if table == self._command.name:
            raise ConfigError(f"{where}: {self._unknown(name, '')}")
        known = commands_with(f"--{name}")
        if not known or (table != SHARED and table not in known):
            raise ConfigError(f"{where}: {self._unknown(name, '')}")

    def _message(self, error: cyclopts.CycloptsError) -> str:
        """One line: the wrong value as it was given, and what it may be."""
        token = getattr(error, "token", None)
        if isinstance(error, cyclopts.UnknownOptionError) and token is not None:
            given = (token.keyword or token.value).partition("=")[0]
            return f"{given}: {self._unknown(given, '--')}"
        if isinstance(error, cyclopts.UnusedCliTokensError):
            return (
                f"{error.unused_tokens[0]!r}: not a flag, and no flag takes it as its value"
                if error.unused_tokens
                else str(error)
            )
        if error.argument is None:
            return " ".join(str(error).split())
        one = self._declared[_name(error.argument)]
        if isinstance(error, cyclopts.MissingArgumentError):
            also = f", here or as {one.variable}" if one.is_required else ""
            return f"{one.flag}: give {one.metavar or 'on or off'}{also}: {one.setting.help}"
        token = token or error.argument.tokens[-1]
        return f"{_quoted(one, token)}: {getattr(error, 'msg', None) or one.problem(token.value)}"

    def _unknown(self, given: str, dashes: str) -> str:
        """Why a name is not one of this command's settings. `dashes`: before the flags in the answer."""
        flag = f"--{given.removeprefix('--')}"
        if flag in _OWN_FLAGS:
            return "takes no value" if dashes else "this can only be given as a flag"
        shown = [one for one in self._declared.values() if not one.setting.is_hidden]
        if known := [one.name for one in shown if flag in one.spellings]:
            return f"no such setting; did you mean {known[0]}?"  # a former name of a flag, in a file
        others = [other for other in commands_with(flag) if other != self._command.name]
        if others:
            return f"a setting of kvrouter {_joined(others)}, not of kvrouter {self._command.name}"
        flags = {spelling for one in shown for spelling in one.spellings}
        flags |= {*_OWN_FLAGS} if dashes else set()
        near = did_you_mean(flag, sorted(flags), "--")
        return (
            f"no such setting{near if dashes else near.replace('--', '')}"
            if near
            else "no such setting; --help-all lists all"
        )

    def _retired(self) -> Iterator[str]:
        """What was given and does nothing any more."""
        for one in self._declared.values():
            source = self._sources.get(one.name)
            if one.setting.retired and source:
                given = one.flag if source == FLAG else f"{one.flag}, from {source},"
                yield f"{given} is ignored: {one.setting.retired}"

    def _unknown_variables(self) -> Iterator[str]:
        known = {one.variable for one in self._declared.values() if not one.setting.is_hidden} | {_CONFIG}
        removed = {variable_of(name): instead for name, instead in self._command.removed.items()}
        for name in sorted(self._environ):
            if not name.startswith(PREFIX) or name in known or name.startswith(_TESTS):
                continue
            if _OF_A_SERVICE.search(name) or _SERVICE_URL.match(self._environ[name]):
                continue
            if name in removed:
                yield f"the variable {name} is ignored: {removed[name]}"
            elif name not in all_variables():
                near = did_you_mean(name, known, PREFIX)
                yield f"the variable {name} is ignored: no such setting{near}"


def _read(one: Declared, text: str, where: str) -> Any:
    try:
        return one.read(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _taken(flag: str, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The last value of a flag, and the other words."""
    value: str | None = None
    rest, waiting = [], iter(words)
    for word in waiting:
        name, equals, text = word.partition("=")
        if name != flag:
            rest.append(word)
            continue
        value = text if equals else next(waiting, "")
        if not value or value.startswith("--"):
            raise ConfigError(f"{flag}: give a file")
    return value, rest


def _read_file(file: str, given: str) -> dict[str, Any]:
    """The tables of a config file. Raises ConfigError. `given`: how the file was named."""
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(_MOST_FILE_BYTES + 1)
        if len(data) > _MOST_FILE_BYTES:
            raise ConfigError(f"{given}: it has more than {_MOST_FILE_BYTES} bytes")
        tables = tomllib.loads(data.decode("utf-8-sig"))  # Windows editors begin files with a mark
    except OSError as error:
        raise ConfigError(f"{given}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{given}: it is not TOML: brackets are nested too deeply") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise ConfigError(f"{given}: it is not TOML: {error}") from None
    for name, table in tables.items():
        if name not in {*MODULES, SHARED}:
            near = did_you_mean(name, [*MODULES, SHARED])
            raise ConfigError(
                f"{file}: [{name}]: no such command{near}{'' if near else f'; use {_listed()}'}"
            )
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: {name}: must be a table, [{name}]")
    return tables


def _listed() -> str:
    return ", ".join(f"[{name}]" for name in (*MODULES, SHARED))


def _texts(one: Declared, value: Any, where: str) -> list[str]:
    """A TOML value as a command line would have it. Raises ConfigError."""
    items = value if isinstance(value, list) else [value]
    if (isinstance(value, list) and not one.is_list) or any(isinstance(item, list | dict) for item in items):
        raise ConfigError(f"{where}: must be {'a list of texts' if one.is_list else 'one value'}")
    try:
        return [str(item).lower() if isinstance(item, bool) else str(item) for item in items]
    except ValueError:  # a hexadecimal number with thousands of digits
        raise ConfigError(f"{where}: the number has too many digits") from None


def _quoted(one: Declared, token: Any) -> str:
    """A wrong value and where it stands."""
    value = "(secret)" if one.setting.is_secret else without_password(token.value)
    return f"{one.flag} {value!r}" if token.source == "cli" else str(token.keyword).format(value)


def _joined(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _name(argument: Any) -> str:
    return str(argument.name).removeprefix("--").lower()


def collecting(declared: Iterable[Declared]) -> Callable[..., dict[str, Any]]:
    """A function with one parameter for each setting, as cyclopts reads it; returns what was given."""

    def collect(*positional: Any, **values: Any) -> dict[str, Any]:
        return {**dict(zip(names, positional, strict=False)), **values}

    ordered = sorted(declared, key=lambda one: not one.setting.is_positional)  # inspect wants these first
    parameters = [
        inspect.Parameter(
            one.parameter,
            _kind(one),
            default=inspect.Parameter.empty if one.is_required else one.default,
            annotation=Annotated[one.type, _parameter(one)],
        )
        for one in ordered
    ]
    names = [one.parameter for one in ordered if one.setting.is_positional]
    collect.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    collect.__annotations__ = {one.name: one.annotation for one in parameters}
    return collect


def _kind(one: Declared) -> Any:
    """A positional setting with other spellings can also be given by these."""
    if not one.setting.is_positional:
        return inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter.POSITIONAL_OR_KEYWORD if one.setting.old else inspect.Parameter.POSITIONAL_ONLY


def _parameter(one: Declared) -> cyclopts.Parameter:
    by_flag = (f"--{one.name}", *one.setting.old) if one.setting.old else None
    return cyclopts.Parameter(
        name=by_flag if one.setting.is_positional else one.flag,
        help=one.setting.help,
        negative=f"--no-{one.name}" if one.is_switch else (),
        converter=partial(_converted, one),
        n_tokens=None if one.is_switch else 1,
        allow_repeating=True,  # scripts and charts append flags to override earlier ones
        required=one.is_required,
    )


def _converted(one: Declared, _type: object, tokens: Sequence[Any]) -> Any:
    """The value of a setting's tokens. If given several times, the last one counts, unless it is a list."""
    if one.is_list:
        return tuple(one.read(token.value) for token in tokens)
    token = tokens[-1]
    return one.read(token.value) if token.implicit_value is UNSET else token.implicit_value

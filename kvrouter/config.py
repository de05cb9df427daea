"""Flags shared by all processes, and the checks that reject wrong values at start-up."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import structlog

from kvrouter.bus.connection import Bus
from kvrouter.bus.embedded import DEFAULT_URL, embedded_server
from kvrouter.bus.options import NatsOptions
from kvrouter.core.feeds.lease import MAX_INTERVAL_MS
from kvrouter.core.native import versions
from kvrouter.core.wire.ids import IDENTIFIER_RULE, is_identifier
from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Setting, Settings

log = structlog.get_logger()

MIN_HEARTBEAT_S = 0.05
MAX_HEARTBEAT_S = MAX_INTERVAL_MS / 1000

# The longest waiting time that a flag accepts.
DAY_S = 86_400.0

_NATS_FILES = {
    "password-file": "the password of --nats-user",
    "token-file": "a token",
    "creds": "a .creds file (JWT and seed)",
    "nkey": "an nkey seed file",
    "tls-ca": "the authority that signed the servers' certificates",
    "tls-cert": "this client's certificate",
    "tls-key": "its key",
}


class FlagHelp(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to a flag's help, unless the text states it or the default is empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, "", []) or "default:" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def identifier(text: str) -> str:
    """An argparse type: a namespace or a worker id, both of which are parts of NATS subjects."""
    if not is_identifier(text):
        raise argparse.ArgumentTypeError(f"{text!r}: {IDENTIFIER_RULE}")
    return text


def read_identifier(text: str) -> str:
    """A namespace or a worker id, both of which are parts of NATS subjects. Raises ValueError."""
    if not is_identifier(text):
        raise ValueError(IDENTIFIER_RULE)
    return text


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be above 0")
    return value


def not_negative(text: str) -> float:
    """An argparse type: a number of at least 0."""
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be at least 0")
    return value


def heartbeat(text: str) -> float:
    """An argparse type: seconds between heartbeats."""
    value = _number(text)
    if not MIN_HEARTBEAT_S <= value <= MAX_HEARTBEAT_S:
        raise argparse.ArgumentTypeError(f"{text!r}: use {MIN_HEARTBEAT_S:g} to {MAX_HEARTBEAT_S:g} seconds")
    return value


def up_to_a_day(text: str) -> float:
    """An argparse type: a waiting time in seconds."""
    value = not_negative(text)
    if value > DAY_S:
        raise argparse.ArgumentTypeError(f"{text!r}: must be at most {DAY_S:g} seconds (a day)")
    return value


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:  # int() alone would accept "1_000" and spaces
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def not_negative_int(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 0")
    return int(text)


def share(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    value = not_negative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be from 0 to 1")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):  # nan would pass the comparisons of all callers
        raise argparse.ArgumentTypeError(f"{text!r}: must be finite")
    return value


@dataclass(frozen=True, slots=True)
class NamespaceOptions(Settings):
    """What every process that uses the bus needs."""

    heading = "NATS"

    nats: NatsOptions = field(default_factory=NatsOptions)
    namespace: Annotated[
        str,
        Setting(
            "separates fleets that share a NATS server", metavar="NAME", read=read_identifier, is_top=True
        ),
    ] = "default"


@dataclass(frozen=True, slots=True)
class CommonOptions(NamespaceOptions):
    """What every long-running process has."""

    heading = "Logs and core"

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Setting("lowest level that is logged to stderr", is_top=True, reloadable=True),
    ] = "info"
    log_format: Annotated[Literal["console", "json"], Setting("json: one object per line")] = "console"
    heartbeat_s: Annotated[
        float,
        Setting(
            "seconds between heartbeats, which other processes are informed of",
            least=MIN_HEARTBEAT_S,
            most=MAX_HEARTBEAT_S,
        ),
    ] = 1.0
    core: Annotated[
        str | None,
        Setting(
            "version of the hot tables and hashes: python, or native (C)",
            choices=versions.CORES,
            default_text="native if it is built",
        ),
    ] = None


def add_nats_flags(parser: argparse.ArgumentParser) -> None:
    """--nats, the credentials for it, --namespace."""
    nats = parser.add_argument_group("NATS")
    nats.add_argument(
        "--nats",
        default=os.environ.get("NATS_URL", DEFAULT_URL),
        metavar="URL[,URL…]|embedded",
        help="NATS servers; default: $NATS_URL, else "
        f"{DEFAULT_URL}; 'embedded' starts a server there unless one is running",
    )
    nats.add_argument("--nats-user", metavar="NAME", help="user name; needs --nats-password-file")
    for flag, text in _NATS_FILES.items():
        nats.add_argument(f"--nats-{flag}", type=Path, metavar="FILE", help=text)
    parser.add_argument(
        "--namespace", type=identifier, default="default", help="separates fleets that share a NATS server"
    )


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `add_nats_flags`, --heartbeat-s, --core, --log-level, --log-format."""
    add_nats_flags(parser)
    parser.add_argument(
        "--heartbeat-s",
        type=heartbeat,
        default=1.0,
        help="seconds between heartbeats, which other processes are informed of; "
        f"from {MIN_HEARTBEAT_S:g} to {MAX_HEARTBEAT_S:g}",
    )
    parser.add_argument(
        "--core",
        choices=versions.CORES,
        help="version of the hot tables and hashes: python, or native (C); default: native if it is built",
    )
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="lowest level that is logged to stderr",
    )
    parser.add_argument(
        "--log-format", choices=["console", "json"], default="console", help="json: one object per line"
    )


def read_key(flag: str, path: Path | None) -> str | None:
    """The bearer key in a flag's file; None without a file or if it is empty. Raises ConfigError."""
    if path is None:
        return None
    try:
        return path.read_text().strip() or None
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {path}: the file is not UTF-8 text") from None


def use_core(core: str | None) -> None:
    """Choose the version of the hot tables and hashes (--core). Raises ConfigError if it is not built."""
    if versions.choose(core) == versions.PYTHON and core is None:
        effect = "the Python version is used: same results, more time and memory in a large fleet"
        log.info("core.not_built", reason=versions.why_not_built, effect=effect)


def nats_options(flags: argparse.Namespace) -> NatsOptions:
    """The options from the flags of `add_nats_flags`. Raises ConfigError."""
    options = NatsOptions(
        servers=tuple(url.strip() for url in flags.nats.split(",") if url.strip()),
        user=flags.nats_user,
        password_file=flags.nats_password_file,
        token_file=flags.nats_token_file,
        creds_file=flags.nats_creds,
        nkey_file=flags.nats_nkey,
        tls_ca=flags.nats_tls_ca,
        tls_cert=flags.nats_tls_cert,
        tls_key=flags.nats_tls_key,
    )
    if not options.is_embedded:
        options.connect_arguments()  # raises for wrong values before any part of the process starts
    return options


@contextlib.asynccontextmanager
async def open_bus(options: NatsOptions | str, *, name: str) -> AsyncIterator[Bus]:
    """The bus at these servers, or at the value of a --nats flag; starts the embedded server if requested."""
    if isinstance(options, str):
        options = NatsOptions(tuple(options.split(",")))
    async with contextlib.AsyncExitStack() as stack:
        if options.is_embedded:
            url = await stack.enter_async_context(embedded_server())
            options = replace(options, servers=(url,))
        yield await stack.enter_async_context(Bus.open(options, name=name))

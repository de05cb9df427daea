"""`kvrouter top` on the command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from kvrouter.dashboard.fleet import Fleet
from kvrouter.errors import KvRouterError
from kvrouter.settings.read import Loaded, run
from kvrouter.top.screen import Choices, draw, plain
from kvrouter.top.settings import COLUMNS, COMMAND, TopSettings
from kvrouter.top.view import Look, View, arranged, view
from kvrouter.verify.index_command import ReplicaIndex, open_replicas

# A fleet of 1,000 targets has half a megabyte.
_MOST_BYTES = 64 << 20
_ANSWER_S = 5.0
_PAGE = 10
_MOST_FILTER = 100

# What terminals send for keys that have no character.
_KEYS = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "escape",
    b"\x7f": "back",
    b"\x08": "back",
}
# Of a key that is not in _KEYS, as an arrow to the side: without this it would be Escape and letters.
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])")


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the fleet; returns the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[TopSettings]) -> int:
    settings = loaded.settings
    is_screen = sys.stdin.isatty() and sys.stdout.isatty() and not (settings.once or settings.json)
    try:
        return asyncio.run(_watch(settings) if is_screen else _print_once(settings))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


async def look_at(replicas: Sequence[ReplicaIndex]) -> Look:
    answers = await asyncio.gather(*map(_ask, replicas))
    return Look(time.monotonic(), dict(zip([one.url for one in replicas], answers, strict=True)))


async def _ask(replica: ReplicaIndex) -> Fleet | str:
    """The fleet, or why there is no answer."""
    body = bytearray()
    try:
        async with asyncio.timeout(_ANSWER_S):
            async for line in replica.lines("/fleet"):
                body += line
                if len(body) > _MOST_BYTES:
                    return f"/fleet has more than {_MOST_BYTES >> 20} MiB"
        return msgspec.json.decode(body, type=Fleet)
    except TimeoutError:
        return f"no answer within {_ANSWER_S:g} s"
    except KvRouterError as error:
        return str(error).removeprefix(replica.url).strip()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"/fleet is not that of this version: {error}"


async def _print_once(settings: TopSettings) -> int:
    """Two looks, so that there are rates."""
    async with open_replicas(settings.replica, settings) as replicas:
        before = await look_at(replicas)
        if before.fleets:
            await asyncio.sleep(settings.interval_s)
        look = await look_at(replicas)
    shown = view(look, before)
    if settings.json:
        sys.stdout.write(msgspec.json.encode(_as_json(shown, settings)).decode() + "\n")
    else:
        _print(shown, settings)
    return 0 if look.fleets else 1


def _print(shown: View, settings: TopSettings) -> None:
    is_wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if is_wide else 160, highlight=False)
    console.print(plain(shown, settings.sort, settings.filter))


def _as_json(shown: View, settings: TopSettings) -> dict[str, Any]:
    rows = arranged(shown.rows, settings.sort, settings.filter)
    return {
        "facts": asdict(shown.facts),
        "problems": shown.problems,
        "targets": [
            msgspec.structs.asdict(row.fact)
            | {"rate": row.rate, "ttft_s": row.ttft_s, "all_answers": row.answers, "all_errors": row.errors}
            | {"differs": row.differs}
            for row in rows
        ],
    }


async def _watch(settings: TopSettings) -> int:
    """Show until `q`, Ctrl-C or SIGTERM; the terminal is then as it was."""
    choices, console = Choices(settings.sort, settings.filter), Console(highlight=False)
    ended, pressed = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, pressed.set)

    def press(key: str) -> None:
        if _press(choices, key):
            ended.set()
        pressed.set()

    async with open_replicas(settings.replica, settings) as replicas:
        before: Look | None = None
        look = Look(time.monotonic(), dict.fromkeys(settings.replica, "not asked yet"))
        with Live(console=console, screen=True, auto_refresh=False) as live, _keys(press):
            looking = asyncio.ensure_future(look_at(replicas))  # a replica that hangs delays no key
            while not ended.is_set():
                width, height = console.size
                live.update(draw(view(look, before), choices, width=width, height=height), refresh=True)
                pressed.clear()
                await _any(looking, ended.wait(), pressed.wait())
                if looking.done():
                    before, look = look, looking.result()
                    looking = asyncio.ensure_future(_later(replicas, settings.interval_s))
            looking.cancel()
    return 0


async def _later(replicas: Sequence[ReplicaIndex], after_s: float) -> Look:
    await asyncio.sleep(after_s)
    return await look_at(replicas)


async def _any(look: asyncio.Future[Look], *events: Any) -> None:
    tasks = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait([look, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


@contextlib.contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` for each key, without echo, while inside."""
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        for key in keys_in(os.read(descriptor, 1024)):
            press(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def keys_in(data: bytes) -> list[str]:
    """The keys in what a terminal has sent: names as in _KEYS, else characters."""
    found = []
    while data:
        if (sequence := _SEQUENCE.match(data)) and sequence[0] not in _KEYS:
            data = data[sequence.end() :]
            continue
        name = next((name for name in sorted(_KEYS, key=len, reverse=True) if data.startswith(name)), b"")
        if name:
            found.append(_KEYS[name])
            data = data[len(name) :]
        else:
            found.append(data[:1].decode("latin-1"))
            data = data[1:]
    return found


def _press(choices: Choices, key: str) -> bool:
    """Do what a key says; whether it ends."""
    if choices.is_typing:
        _type(choices, key)
        return False
    match key:
        case "q":
            return True
        case "up" | "k":
            choices.selected -= 1
        case "down" | "j":
            choices.selected += 1
        case "page up":
            choices.selected -= _PAGE
        case "page down":
            choices.selected += _PAGE
        case "s":
            choices.sort = COLUMNS[(COLUMNS.index(choices.sort) + 1) % len(COLUMNS)]
        case "r":
            choices.is_reversed = not choices.is_reversed
        case "/":
            choices.is_typing = True
        case "enter":
            choices.shows_detail = not choices.shows_detail
        case "?":
            choices.shows_help = not choices.shows_help
        case "escape":
            choices.text, choices.shows_help, choices.shows_detail = "", False, False
    choices.choose()
    return False


def _type(choices: Choices, key: str) -> None:
    match key:
        case "enter":
            choices.is_typing = False
        case "escape":
            choices.is_typing, choices.text = False, ""
        case "back":
            choices.text = choices.text[:-1]
        case _ if len(key) == 1 and key.isprintable():
            choices.text = (choices.text + key)[:_MOST_FILTER]


if __name__ == "__main__":
    sys.exit(main())

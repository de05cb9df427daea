"""`kvrouter top` on the command line."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from kvrouter.observe.document import Fleet
from kvrouter.observe.output import console, forget_stdout
from kvrouter.observe.replica import ReplicaClient, ReplicaError, open_replicas
from kvrouter.observe.top.screen import Choices, draw, plain
from kvrouter.observe.top.settings import COLUMNS, COMMAND, TopSettings
from kvrouter.observe.top.view import History, Seen, TopView, arranged, view
from kvrouter.settings.read import Loaded, run

_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10}
_MOST_FILTER = 100

# What terminals send for keys that have no character.
_KEYS = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\r": "enter",
    "\n": "enter",
    "\x1b": "escape",
    "\x7f": "back",
    "\x08": "back",
}
_BY_LENGTH = sorted(_KEYS, key=len, reverse=True)
# Of a key that is not in _KEYS, as an arrow to the side: without this it would be Escape and letters.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])")
# Where termios has the control characters.
_CHARACTERS = 6


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
        forget_stdout()
        return 0


async def _ask(replica: ReplicaClient) -> Fleet | str:
    """The fleet, or why there is no answer."""
    try:
        return await replica.fleet()
    except ReplicaError as error:
        return str(error).removeprefix(replica.url).strip()


async def look_twice(replicas: Sequence[ReplicaClient], interval_s: float) -> dict[str, Seen]:
    """What the replicas answer, with what they answered before: so that there are rates."""
    histories = [History() for _ in replicas]
    for is_last in (False, True):
        answers = await asyncio.gather(*map(_ask, replicas))
        seen = [one.seen(answer) for one, answer in zip(histories, answers, strict=True)]
        if not is_last and any(isinstance(answer, Fleet) for answer in answers):
            await asyncio.sleep(interval_s)
    return {replica.url: one for replica, one in zip(replicas, seen, strict=True)}


async def _print_once(settings: TopSettings) -> int:
    async with open_replicas(settings.replica, settings) as replicas:
        seen = await look_twice(replicas, settings.interval_s)
    shown = view(seen)
    if settings.json:
        sys.stdout.write(msgspec.json.encode(_as_json(shown, settings)).decode() + "\n")
    else:
        _print(shown, settings)
    return 0 if any(isinstance(one.now, Fleet) for one in seen.values()) else 1


def _print(shown: TopView, settings: TopSettings) -> None:
    console().print(plain(shown, settings.sort, settings.filter), highlight=False)


def _as_json(shown: TopView, settings: TopSettings) -> dict[str, Any]:
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
    loop, is_over, news = asyncio.get_running_loop(), False, asyncio.Event()
    seen = dict.fromkeys(settings.replica, Seen("not asked yet"))
    shown = view(seen)

    def end() -> None:
        nonlocal is_over
        is_over = True
        news.set()

    def press(key: str) -> None:
        if _press(choices, key):
            end()
        news.set()

    def take(url: str, answer: Seen) -> None:
        nonlocal shown
        seen[url] = answer
        shown = view(seen)
        news.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGWINCH, news.set)
    async with open_replicas(settings.replica, settings) as replicas:
        with Live(console=console, screen=True, auto_refresh=False) as live, _keys(press):
            # each on its own: one that hangs delays neither the others nor a key
            asked = [_follow(one, settings.interval_s, partial(take, one.url)) for one in replicas]
            looking = [asyncio.create_task(each) for each in asked]
            while not is_over:
                width, height = console.size
                live.update(draw(shown, choices, width=width, height=height), refresh=True)
                await news.wait()
                news.clear()
            for task in looking:
                task.cancel()
    return 0


async def _follow(replica: ReplicaClient, interval_s: float, take: Callable[[Seen], None]) -> None:
    """Ask a replica again and again."""
    history = History()
    while True:
        take(history.seen(await _ask(replica)))
        await asyncio.sleep(interval_s)


@contextlib.contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` for each key, without echo, while inside."""
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read() -> None:
        for key in keys_in(decoder.decode(os.read(descriptor, 1024))):
            press(key)

    tty.setcbreak(descriptor)
    own = termios.tcgetattr(descriptor)
    own[_CHARACTERS][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell with this terminal
    termios.tcsetattr(descriptor, termios.TCSADRAIN, own)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def keys_in(text: str) -> list[str]:
    """The keys in what a terminal has sent: names as in _KEYS, else characters."""
    found = []
    while text:
        if (sequence := _SEQUENCE.match(text)) and sequence[0] not in _KEYS:
            text = text[sequence.end() :]
            continue
        sent = next((sent for sent in _BY_LENGTH if text.startswith(sent)), text[:1])
        found.append(_KEYS.get(sent, sent))
        text = text[len(sent) :]
    return found


def _press(choices: Choices, key: str) -> bool:
    """Do what a key says; whether it ends."""
    if choices.is_typing:
        _type(choices, key)
        return False
    match key:
        case "q":
            return True
        case _ if key in _MOVES:
            choices.selected += _MOVES[key]
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

"""Combines the output of several processes: whole lines, each labelled with the name of its process.

    agent-1    | 2026-11-21T10:00:00Z [info] engine.up url=…

With JSON logs the name becomes a key of each object instead, and a line of text the event `process.said`.

A thread writes, so that an output that is not read delays no process: lines wait in a bounded queue; when it
is full, they are counted and dropped.
"""

from __future__ import annotations

import datetime
import io
import json
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

# A longer line is written in parts, so that a process without newlines cannot fill the memory.
MAX_LINE_BYTES = 64 * 1024
# Lines that wait for the writer; more are dropped, so that an output that is not read cannot fill the memory.
MAX_LINES = 10_000
# The command must end although its output is not read.
_CLOSE_S = 2.0
_COLOURS = (36, 33, 32, 35, 34, 31)


class Lines:
    """Cuts the output of a process into lines."""

    def __init__(self) -> None:
        self._part = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines completed by `data`, without their ends."""
        *lines, self._part = (self._part + data).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
        while len(self._part) >= MAX_LINE_BYTES:
            yield self._part[:MAX_LINE_BYTES]
            self._part = self._part[MAX_LINE_BYTES:]

    def rest(self) -> Iterator[bytes]:
        """The unfinished last line."""
        if self._part:
            yield self._part
        self._part = b""


class Output:
    """Writes the lines of all processes. `width` is the length of the longest name.

    `on_line` gets the name and each line before it is written.
    """

    def __init__(
        self,
        out: BinaryIO,
        err: BinaryIO,
        *,
        width: int,
        is_json: bool = False,
        on_line: Callable[[str, bytes], None] | None = None,
    ) -> None:
        self.lost = 0
        self._on_line = on_line
        self._streams = {False: out, True: err}
        self._is_tty = {key: stream.isatty() for key, stream in self._streams.items()}
        self._width = width
        self._is_json = is_json
        self._colours: dict[str, int] = {}
        self._queue: queue.Queue[tuple[bool, bytes] | None] = queue.Queue(MAX_LINES)
        self._thread = threading.Thread(target=self._write_all, name="output", daemon=True)
        self._thread.start()

    def line(self, name: str, line: bytes, *, is_error: bool = False) -> None:
        """Queue a line."""
        if self._on_line is not None:
            self._on_line(name, line)
        try:
            self._queue.put_nowait((is_error, self._labelled(name, line, is_tty=self._is_tty[is_error])))
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Write the queued lines, within _CLOSE_S."""
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)

    def _labelled(self, name: str, line: bytes, *, is_tty: bool) -> bytes:
        if self._is_json:
            return _json_line(name, line)
        label = f"{name:<{self._width}} | "
        if is_tty:
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            label = f"\033[{colour}m{label}\033[0m"
        return label.encode() + line + b"\n"

    def _lost_line(self, count: int) -> bytes:
        if self._is_json:
            return _event("serve", {"lines": count, "event": "log.lost", "level": "warning"})
        return self._labelled("serve", b"lines lost: %d" % count, is_tty=False)

    def _write_all(self) -> None:
        reported = 0
        while (entry := self._queue.get()) is not None:
            is_error, line = entry
            if self.lost > reported:
                line += self._lost_line(self.lost - reported)
                reported = self.lost
            try:
                self._streams[is_error].write(line)
                self._streams[is_error].flush()
            except (OSError, ValueError):
                continue  # the reader of the output has gone; the processes must go on


class LabelledText(io.TextIOBase):
    """Replaces sys.stderr of this process, so that its lines are labelled like those of its children."""

    def __init__(self, output: Output, name: str) -> None:
        self._output = output
        self._name = name
        self._lines = Lines()

    def write(self, text: str) -> int:
        """Pass on the whole lines."""
        for line in self._lines.feed(text.encode(errors="replace")):
            self._output.line(self._name, line, is_error=True)
        return len(text)


def _json_line(name: str, line: bytes) -> bytes:
    if line.startswith(b"{") and line.endswith(b"}") and len(line) > 2:
        return b'{"process": ' + json.dumps(name).encode() + b", " + line[1:] + b"\n"
    text = line.decode(errors="replace")
    return _event(name, {"line": text, "event": "process.said", "level": "info"})


def _event(name: str, facts: dict[str, Any]) -> bytes:
    now = datetime.datetime.now(datetime.UTC).isoformat()
    return json.dumps({"process": name, **facts, "timestamp": now}).encode() + b"\n"

"""Lines of several processes in one output."""

from __future__ import annotations

import io
import json
import threading

from kvrouter.processes.output import MAX_LINE_BYTES, MAX_LINES, LabelledText, Lines, Output


class Terminal(io.BytesIO):
    """A stream whose isatty() is true."""

    def isatty(self) -> bool:
        return True


class Stalled(io.BytesIO):
    """A stream that blocks until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = threading.Event()
        self.is_writing = threading.Event()

    def write(self, data: object) -> int:
        self.is_writing.set()
        self.flows.wait()
        return super().write(data)  # type: ignore[arg-type]


class Gone(io.BytesIO):
    """A pipe without a reader."""

    def write(self, data: object) -> int:
        raise BrokenPipeError


def test_lines_are_whole() -> None:
    """Lines are whole however they were received; an unfinished one comes last."""
    lines = Lines()
    out = [line for part in (b"on", b"e\ntwo\r\nth", b"ree", b"\n\nend") for line in lines.feed(part)]

    assert [b"one", b"two", b"three", b"", b"end"] == [*out, *lines.rest()]
    assert [] == list(lines.rest())


def test_endless_line() -> None:
    """A line without an end is cut, so that it cannot fill the memory."""
    assert [MAX_LINE_BYTES, MAX_LINE_BYTES] == [
        len(line) for line in Lines().feed(b"x" * (2 * MAX_LINE_BYTES + 5))
    ]


def test_labels() -> None:
    """Each line begins with its process's name; errors go to stderr; files have no colours."""
    out, err = io.BytesIO(), io.BytesIO()
    output = Output(out, err, width=8)

    output.line("agent-1", b"up")
    output.line("frontend", b"caf\xe9", is_error=True)
    output.close()

    assert b"agent-1  | up\n" == out.getvalue()
    assert b"frontend | caf\xe9\n" == err.getvalue()


def test_colours_on_a_terminal() -> None:
    """On a terminal each name has its own colour."""
    out = Terminal()
    output = Output(out, io.BytesIO(), width=1)

    for name in ("a", "b", "a"):
        output.line(name, b"x")
    output.close()

    first, second, third = out.getvalue().splitlines()
    assert first == third
    assert first.startswith(b"\033[36m")
    assert second.startswith(b"\033[33m")


def test_json() -> None:
    """With JSON logs every line, also plain text, is an object that names its process."""
    out = io.BytesIO()
    output = Output(out, io.BytesIO(), width=1, is_json=True)

    output.line("agent-1", b'{"event": "up"}')
    output.line("agent-1", b"Traceback")
    output.line("agent-1", b"{}")
    output.close()

    assert [
        ("agent-1", "up", None),
        ("agent-1", "process.said", "Traceback"),
        ("agent-1", "process.said", "{}"),
    ] == [
        (line["process"], line["event"], line.get("line"))
        for line in map(json.loads, out.getvalue().splitlines())
    ]


def test_output_that_is_not_read() -> None:
    """An output that blocks delays no process; the number of lost lines is reported later."""
    out = Stalled()
    output = Output(out, io.BytesIO(), width=1)

    output.line("a", b"0")
    out.is_writing.wait(5)
    for number in range(1, MAX_LINES + 4):
        output.line("a", b"%d" % number)
    out.flows.set()
    output.close()

    first, second, lost, *others = out.getvalue().splitlines()
    assert [b"a | 0", b"a | 1", b"serve | lines lost: 3"] == [first, second, lost]
    assert [b"a | %d" % number for number in range(2, MAX_LINES + 1)] == others


def test_closed_pipe() -> None:
    """If one stream's pipe is closed, the other still gets its lines."""
    err = io.BytesIO()
    output = Output(Gone(), err, width=1)

    output.line("a", b"lost")
    output.line("a", b"kept", is_error=True)
    output.close()

    assert b"a | kept\n" == err.getvalue()


def test_own_stderr() -> None:
    """Text that this process prints to stderr is labelled as well."""
    err = io.BytesIO()
    output = Output(io.BytesIO(), err, width=5)

    print("one", "two", file=LabelledText(output, "serve"))
    output.close()

    assert b"serve | one two\n" == err.getvalue()

"""Cost without a clock: how many instructions the interpreter executes. Work inside C is not counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec

P = ParamSpec("P")


def instructions(act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> int:
    """Bytecode instructions of one call: the same on every machine, however busy it is."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act(*args, **kwargs)
    finally:
        sys.settrace(before)
    return count

"""`valgrind … python -m scripts.kit.bench.wire.stepped LIBRARY DIRECTORY … kvrouter.frontend FLAGS`.

The frontend of steps.py: while DIRECTORY/on exists, each callback of its event loop is counted apart. Long
ones are dumped by callgrind with their names. The loop is asyncio's: its callbacks are Python's.
"""

from __future__ import annotations

import asyncio
import ctypes
import runpy
import sys
import time
from pathlib import Path

import uvloop

# Of processor time under valgrind, where it is some 50 times as long: much less than a step may take.
LONG_S = 0.02


def count_steps(library: str, directory: Path) -> None:
    """Have each callback of asyncio's loops counted. `library`: functions `zero` and `dump`."""
    callgrind, switch = ctypes.CDLL(library), str(directory / "on")
    run = asyncio.events.Handle._run  # there is no other place

    def counted(handle: asyncio.Handle) -> None:
        if not Path(switch).exists():
            return run(handle)
        callgrind.zero()
        began = time.thread_time()
        run(handle)
        if time.thread_time() - began > LONG_S:
            callgrind.dump(_name_of(handle).encode())
        return None

    asyncio.events.Handle._run = counted  # type: ignore[assignment,method-assign]
    uvloop.run = asyncio.run  # type: ignore[assignment]


def _name_of(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return f"a step of {getattr(owner.get_coro(), '__qualname__', owner.get_coro())}"
    return str(getattr(callback, "__qualname__", callback)).replace("\n", " ")


if __name__ == "__main__":
    library, directory, *words = sys.argv[1:]
    count_steps(library, Path(directory))
    sys.argv = words[words.index("kvrouter.frontend") :]
    runpy.run_module("kvrouter.frontend", run_name="__main__", alter_sys=True)

"""The /metrics of several processes as one text: each sample gets the label `process`."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from time import perf_counter

from kvrouter.telemetry.exposition import SLICE_S, head

SCRAPED = "kvrouter_process_scraped"
_LOOK_EVERY = 63


async def merged(texts: Mapping[str, bytes | None], slice_s: float = SLICE_S) -> bytes:
    """One text of those of each process, by its name; None: it did not answer.

    Prometheus wants the samples of a family together: they are collected by family first. The event loop
    runs between slices.
    """
    families: dict[str, list[str]] = {}
    end = perf_counter() + slice_s
    for process, text in texts.items():
        family: list[str] = []
        begins, amid = f'{{process="{process}"', f'{{process="{process}",'
        # not splitlines(): it also cuts at characters such as U+2028, which a label may contain
        for number, line in enumerate(io.StringIO((text or b"").decode(), newline="\n")):
            if not number & _LOOK_EVERY and perf_counter() > end:
                await asyncio.sleep(0)
                end = perf_counter() + slice_s
            if line.startswith("#"):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, [])
                if line not in family[:2]:
                    family.append(line)
                continue
            name, brace, rest = line.partition("{")
            if brace:
                family.append(f"{name}{amid}{rest}")
            else:
                name, _, value = line.partition(" ")
                family.append(f"{name}{begins}}} {value}")
    lines = [
        f'{SCRAPED}{{process="{process}"}} {int(text is not None)}.0\n' for process, text in texts.items()
    ]
    families[SCRAPED] = [head(SCRAPED), *lines]
    return "".join("".join(family) for family in families.values()).encode()

"""Where and when something was measured."""

from __future__ import annotations

import platform
import time
from pathlib import Path

from kvrouter.version import __version__


def machine() -> dict[str, object]:
    """For a bench's JSON."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.processor(),
        "cores": len(cpus),
        "python": platform.python_version(),
        "kvrouter": __version__,
    }

"""`python -m kvrouter.router`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from kvrouter.config import use_core
from kvrouter.core.native import versions
from kvrouter.router.settings import COMMAND, RouterOptions
from kvrouter.settings.read import Loaded, run
from kvrouter.telemetry.logs import set_up_logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one router; returns the exit code."""
    return run(COMMAND, arguments, _run)


def _run(loaded: Loaded[RouterOptions]) -> int:
    # only now: --help and wrong settings are answered without loading what serves
    import uvloop

    from kvrouter.frontend.run import serve
    from kvrouter.router.service import open_router_site

    options = loaded.settings
    versions.choose(options.core)
    set_up_logs(options.log_level, options.log_format)
    use_core(options.core)
    uvloop.run(serve(loaded, partial(open_router_site, options=options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

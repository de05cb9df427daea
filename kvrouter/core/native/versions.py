"""Which version of the hot tables and hashes this process uses: the one in Python, or its twin in C.

Chosen once, at the start, before any table is made. The twin (core/native) is built where a C compiler
is at hand; without it everything works, and tables of a large fleet cost more time and memory.
"""

from __future__ import annotations

from types import ModuleType

from kvrouter.errors import ConfigError

PYTHON, NATIVE = "python", "native"
CORES = (PYTHON, NATIVE)

_built: tuple[ModuleType, ModuleType, ModuleType] | None = None
why_not_built = ""
"""Why there is no native version; empty if there is one."""
try:
    import kvrouter.core.native.columns
    import kvrouter.core.native.hashes
    import kvrouter.core.native.table

    _built = (kvrouter.core.native.hashes, kvrouter.core.native.table, kvrouter.core.native.columns)
except ImportError as error:
    why_not_built = str(error)

hashes: ModuleType | None = None
"""The native hash functions, if they are in use."""
table: ModuleType | None = None
"""The native table, if it is in use."""
columns: ModuleType | None = None
"""The native arithmetic over targets, if it is in use."""


def choose(core: str | None) -> str:
    """Use this version from now on; None: native if it is built. Returns its name.

    Raises ConfigError if it is not there.
    """
    global hashes, table, columns
    if core == NATIVE and _built is None:
        raise ConfigError(
            f"--core native: it is not built here ({why_not_built}); install kvrouter where a C compiler is, "
            "or leave --core out to use the Python version"
        )
    hashes, table, columns = (None, None, None) if core == PYTHON or _built is None else _built
    return in_use()


def in_use() -> str:
    """The name of the version in use."""
    return PYTHON if table is None else NATIVE


choose(None)

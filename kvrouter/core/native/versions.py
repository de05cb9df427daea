"""Which version of the hot tables, hashes and scans this process uses: the one in Python, or the one in C.

A process chooses once, at its start, before it makes a table. The C version is built where a C compiler is
at hand; without it everything works, and tables of a large fleet cost more time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from kvrouter.errors import ConfigError

PYTHON, NATIVE = "python", "native"
CORES = (PYTHON, NATIVE)


@dataclass(frozen=True, slots=True)
class Version:
    """A choice: the C modules to call, all None for the Python version."""

    name: str
    hashes: ModuleType | None = None
    table: ModuleType | None = None
    columns: ModuleType | None = None
    bodies: ModuleType | None = None
    messages: ModuleType | None = None


def _load_native() -> tuple[Version | None, str]:
    """The C version, or why it is not built."""
    try:
        import kvrouter.core.native.bodies
        import kvrouter.core.native.columns
        import kvrouter.core.native.hashes
        import kvrouter.core.native.messages
        import kvrouter.core.native.table
    except ImportError as error:
        return None, str(error)
    native = kvrouter.core.native
    modules = native.hashes, native.table, native.columns, native.bodies, native.messages
    return Version(NATIVE, *modules), ""


_PYTHON = Version(PYTHON)
_native, why_not_built = _load_native()

# The only thing here that changes: replaced as a whole, so a caller never sees parts of two versions. It is
# a module's attribute and no argument because `block_hashes` and `BlockIndex` are public and take none.
chosen = _native or _PYTHON


def choose(core: str | None) -> str:
    """Use this version from now on (None: the C version if it is built); returns its name.

    Raises ConfigError if it is not built.
    """
    global chosen  # noqa: PLW0603  # once in the life of a process, see above
    if core == NATIVE and _native is None:
        raise ConfigError(
            f"--core native: it is not built here ({why_not_built}); install kvrouter where a C compiler is, "
            "or leave --core out to use the Python version"
        )
    chosen = _PYTHON if core == PYTHON or _native is None else _native
    return chosen.name


def in_use() -> str:
    """The name of the version in use."""
    return chosen.name

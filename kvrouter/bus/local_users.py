"""The users of a NATS server that kvrouter starts on this machine, in files of the Unix user who starts it.

    $XDG_STATE_HOME/kvrouter/nats-PORT/    0700, by default in ~/.local/state; found by the server's port
        frontend.nk  agent.nk  …           0600, a user's seed: it stays the same for later servers
        server.conf                        0600, what nats-server reads: its name, the users' public keys

    make ──> server.conf ──> nats-server ──> INFO: server_name ──> LocalUser.sign ──> CONNECT

The server's name is the public key of the user `frontend`. So a client that reads a server's INFO knows
whether the files belong to it: a former server's files, or another server on the port, get no signature. They
are used for a server on this machine only, and never where flags or URLs say who the client is.

Every process of this Unix user can read every seed. So agents share one user here, for any worker id and any
namespace; `kvrouter nats accounts` makes one for each agent.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import secrets
from pathlib import Path
from typing import Any

from kvrouter.bus.rights import (
    AGENT,
    CALLER,
    FRONTEND,
    TOOL,
    VERIFY,
    NatsRights,
    agent_rights,
    caller_rights,
    frontend_rights,
    key_of,
    public_key,
    server_file,
    tool_rights,
    verify_rights,
    write_private,
)
from kvrouter.bus.subjects import EVERY_WORKER, Subjects
from kvrouter.errors import ConfigError

SERVER_FILE = "server.conf"
REJECTED = "NATS rejects these credentials; see the --nats-… flags in --help"


def rights_by_name() -> dict[str, NatsRights]:
    """The users of an embedded server."""
    subjects = Subjects.of_every_namespace()
    return {
        FRONTEND: frontend_rights(subjects),
        AGENT: agent_rights(subjects, EVERY_WORKER),
        VERIFY: verify_rights(subjects),
        TOOL: tool_rights(subjects),
        CALLER: caller_rights(subjects, "*"),
    }


def directory_of(port: int) -> Path:
    """Where this Unix user keeps the users of a server on this port. Raises ConfigError without a home."""
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not named.is_absolute():  # as the XDG Base Directory Specification says
        try:
            named = Path.home() / ".local" / "state"
        except RuntimeError:
            raise ConfigError("this Unix user has no home directory; set XDG_STATE_HOME") from None
    return named / "kvrouter" / f"nats-{port}"


def make(port: int) -> Path:
    """Make the users of a server on this port, or keep those that exist; returns the server's file.

    Raises ConfigError if this Unix user cannot keep them to itself.
    """
    try:
        directory = directory_of(port)
        return _make_in(directory)
    except (OSError, ConfigError) as error:
        raise ConfigError(
            f"the users of the embedded NATS server cannot be kept: {error}. Give another directory as "
            "XDG_STATE_HOME, or --nats-open for a server without users"
        ) from None


def _make_in(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    if directory.stat().st_uid != os.geteuid():
        raise OSError(f"{directory} belongs to another Unix user")
    directory.chmod(0o700)
    rights = rights_by_name()
    keys = {}
    for name in rights:
        file = directory / f"{name}.nk"
        keys[name] = public_key(file)
        file.chmod(0o600)
    content = f"server_name: {keys[FRONTEND]}\n{server_file(rights, keys)}"
    made, file = directory / f".{SERVER_FILE}.{secrets.token_hex(8)}", directory / SERVER_FILE
    write_private(made, content.encode())
    made.replace(file)  # in one step: no server reads half of it
    return file


class LocalUser:
    """Who a client is on a server that kvrouter has started on this machine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.trouble = ""
        """Why the server before this client has no user for it, and what to do; empty if it has."""

    def pair(self, port: int, server_name: str) -> Any:
        """The key for the server of this name on this port of this machine; None if there is none."""
        try:
            found = self._read(directory_of(port), server_name)
        except OSError as error:
            self.trouble = _remedy(f"{error.filename}: {error.strerror}")
        except (ConfigError, ValueError) as error:
            self.trouble = _remedy(str(error))
        else:
            self.trouble = ""
            return found
        return None

    def _read(self, directory: Path, server_name: str) -> Any:
        """The key. Raises OSError, and ValueError if the directory is not that of this server."""
        import nkeys  # type: ignore[import-untyped]

        if server_name != key_of((directory / f"{FRONTEND}.nk").read_bytes()):
            raise ValueError(f"{directory} has the users of another server")
        seed = (directory / f"{self._name}.nk").read_bytes().strip()
        key_of(seed)  # its errors are of one kind
        return nkeys.from_seed(bytearray(seed))


def is_here(host: str, own_host: str) -> bool:
    """Whether a connection with these ends stays on this machine."""
    with contextlib.suppress(ValueError):
        return host == own_host or ipaddress.ip_address(host).is_loopback
    return False


def _remedy(reason: str) -> str:
    return (
        f"this NATS server has users, and this process is none of them: {reason}. If kvrouter started the "
        "server here, run this as the same Unix user, or give a seed of that user's state directory, as in "
        "--nats-nkey ~USER/.local/state/kvrouter/nats-PORT/frontend.nk; otherwise give the server's own "
        "credentials (the --nats-… flags in --help)"
    )


def signature(pair: Any, nonce: str) -> bytes:
    """What proves to the server that the client has the seed."""
    signed: bytes = pair.sign(nonce.encode())
    return base64.b64encode(signed)

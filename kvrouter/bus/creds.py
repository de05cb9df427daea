"""Who one is to NATS, from files: .creds files (a JWT, and the seed that proves it) and nkey seeds."""

from __future__ import annotations

import base64
import contextlib
import re
from pathlib import Path

import nkeys  # type: ignore[import-untyped]

from kvrouter.errors import ConfigError

_JWT = re.compile(rb"BEGIN NATS USER JWT-+\s+(\S+)")
_SEED = re.compile(rb"BEGIN USER NKEY SEED-+\s+(\S+)")


class CredsFile:
    """A .creds file, as nats-py's call-backs want it.

    It is read anew for every connection, so that it can be renewed while the process runs. One that
    is half written or gone at that moment does no harm: what it said before still holds.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if it is no .creds file."""
        self._path = path
        self._jwt, self._seed = self._read()

    def sign(self, nonce: str) -> bytes:
        """The proof that one is who the JWT is about; asked for first."""
        with contextlib.suppress(ConfigError):
            self._jwt, self._seed = self._read()
        signature: bytes = nkeys.from_seed(bytearray(self._seed)).sign(nonce.encode())
        return base64.b64encode(signature)

    def jwt(self) -> bytearray:
        """What the account says of the user."""
        return bytearray(self._jwt)

    def _read(self) -> tuple[bytes, bytes]:
        try:
            text = self._path.read_bytes()
        except OSError as error:
            raise ConfigError(f"--nats-creds {self._path}: {error.strerror}") from None
        jwt, seed = _JWT.search(text), _SEED.search(text)
        if jwt is None or seed is None or not _is_seed(seed[1]):
            lacks = "USER JWT" if jwt is None else "USER NKEY SEED"
            raise ConfigError(
                f"--nats-creds {self._path}: no {lacks} in it; give a file as `nsc generate creds` writes it"
            )
        return jwt[1], seed[1]


def check_seed_file(path: Path) -> None:
    """Raise ConfigError unless it holds an nkey seed."""
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--nats-nkey {path}: {error.strerror}") from None
    if not _is_seed(text):
        raise ConfigError(f"--nats-nkey {path}: no nkey seed in it; it is one line that begins with SU")


def _is_seed(text: bytes) -> bool:
    try:
        nkeys.from_seed(bytearray(text))
    except Exception:  # of many kinds
        return False
    return True

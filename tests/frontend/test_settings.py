"""Flags: the documented defaults, and messages for wrong values."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrouter.errors import ConfigError
from kvrouter.frontend.__main__ import main
from kvrouter.frontend.settings import parse_options
from kvrouter.relay.outcomes import Limits


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flags: the documented defaults."""
    monkeypatch.delenv("NATS_URL", raising=False)
    options = parse_options([])

    assert (8000, "default", "kv", None, 0.0) == (
        options.port,
        options.namespace,
        options.router_mode,
        options.policy.overlap_weight,
        options.policy.temperature,
    )
    assert (Limits(600, 300), 2, 60, 5, 300) == (
        options.limits,
        options.retries,
        options.ready_timeout_s,
        options.drain_grace_s,
        options.drain_timeout_s,
    )
    pool = options.replica.pool
    assert (True, 120, True, None) == (pool.use_kv_events, pool.ttl_s, pool.inflight_overlap, pool.block_size)
    assert (False, 5, 1) == (options.replica.synced, options.replica.lease_rounds, options.heartbeat_s)


def test_model_paths(tmp_path: Path) -> None:
    """One directory for all models, or one per model; a directory may contain `=` in its name."""
    (odd := tmp_path / "a=b").mkdir()
    options = parse_options(["--model-path", "qwen=/q", "--model-path", str(odd), "--model-path", "org/m=/m"])

    tokens, without = options.tokens, parse_options([]).tokens
    assert (str(odd), {"qwen": "/q", "org/m": "/m"}) == (tokens.model_path, tokens.model_paths)
    assert (None, {}) == (without.model_path, without.model_paths)
    for wrong in ("=/q", "qwen="):
        with pytest.raises(ConfigError):
            parse_options(["--model-path", wrong])


def test_aliases() -> None:
    """Dynamo's names of flags work."""
    options = parse_options(["--http-port", "1", "--no-kv-events", "--router-ttl-secs", "9"])

    assert (1, False, 9) == (options.port, options.replica.pool.use_kv_events, options.replica.pool.ttl_s)


def test_nats_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """$NATS_URL is the default of --nats."""
    monkeypatch.setenv("NATS_URL", "nats://elsewhere:1")

    assert ("nats://elsewhere:1",) == parse_options([]).nats.servers


def test_lease_in_heartbeats() -> None:
    """A lease is counted in heartbeats, at least two."""
    settings = [
        parse_options(["--lease-s", lease, "--heartbeat-s", beat]).replica
        for lease, beat in (("3", "0.5"), ("2", "1"))
    ]

    assert [(6, 0.5), (2, 1.0)] == [(one.lease_rounds, one.heartbeat_s) for one in settings]


def test_lease_shorter_than_two_heartbeats() -> None:
    """It would end between two heartbeats. The message contains the smallest valid value."""
    with pytest.raises(
        ConfigError, match="--lease-s 5 is less than two heartbeats of 10 s: give at least 20"
    ):
        parse_options(["--heartbeat-s", "10"])


def test_max_body_in_mib() -> None:
    """--max-body-mb counts MiB."""
    assert 3 * 1024 * 1024 == parse_options(["--max-body-mb", "3"]).max_body_bytes


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "65536"], "must be a whole number from 0 to 65535"),
        (["--port", "x"], "must be a whole number"),
        (["--namespace", "a.b"], "use 1 to 64 of A-Z a-z 0-9 _ -"),
        (["--router-mode", "best"], "must be direct, kv, "),
        (["--router-temperature", "-1"], "must be a number of at least 0"),
        (["--kv-overlap-score-weight", "nan"], "must be auto or a number of at least 0"),
        (["--heartbeat-s", "1e-9"], "must be a number from 0.05 to 10"),
        (["--heartbeat-s", "61"], "must be a number from 0.05 to 10"),
        (["--retries", "-1"], "must be a whole number of at least 0"),
        (["--max-body-mib", "1.5"], "must be a whole number of at least 1"),
        (["--idle-timeout-s", "soon"], "'soon': must be a number above 0"),
        (["--kv-cache-block-size", "0"], "must be a whole number of at least 1"),
        (["--pd-same-label", "zone=a"], "must be the name of one label, without a value"),
        (["--pd-same-label", "zone,rack"], "must be the name of one label"),
        (["--sync"], "no such setting"),
    ],
)
def test_wrong_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong flag ends the process with code 2 and a message that names flag, value and way out."""
    assert 2 == main(flags)

    said = capsys.readouterr().err
    assert words in said
    assert flags[0] in said

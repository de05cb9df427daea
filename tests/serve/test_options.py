"""The flags of `kvrouter serve`: its own, the shared ones, the frontends'."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrouter.errors import ConfigError
from kvrouter.serve.__main__ import main
from kvrouter.serve.settings import ServeOptions, parse_options
from tests.certificates import Authority

ENGINE = "--engine=http://127.0.0.1:25100"


def parse(*flags: str) -> ServeOptions:
    """The options for these flags."""
    return parse_options([ENGINE, *flags])


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica on port 8000 and an embedded NATS server."""
    monkeypatch.delenv("NATS_URL", raising=False)

    options = parse()

    assert ([(8000, 8100)], True, ()) == (options.ports(), options.nats.is_embedded, options.agent_settings)


def test_nats_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """$NATS_URL replaces the default of --nats."""
    monkeypatch.setenv("NATS_URL", "nats://elsewhere:4222")

    assert ("nats://elsewhere:4222",) == parse().nats.servers


def test_who_gets_which_flag(tmp_path: Path) -> None:
    """Shared flags reach agents and frontends, a frontend's own only the frontends."""
    options = parse(
        "--replicas", "3", "--port", "9000", "--namespace", "n", "--router-mode", "random",
        "--kv-overlap-score-weight=2", "--state-dir", str(tmp_path), "--no-use-kv-events",
        "--metric", "preempted=vllm:num_preemptions_total",
    )  # fmt: skip
    agent = options.agent(options.engines[0])

    assert [(9000, 9100), (9001, 9101), (9002, 9102)] == options.ports()
    assert ("n", tmp_path / "127-0-0-1-25100.state") == (agent.namespace, agent.state_file)
    assert {"preempted": "vllm:num_preemptions_total"} == agent.metrics
    assert ("--namespace=n",) == options.agent_settings
    assert {
        "--processes=1", "--port=9000", "--namespace=n", "--router-mode=random",
        "--kv-overlap-score-weight=2", "--no-use-kv-events",
    } == set(options.frontend_flags)  # fmt: skip
    assert ("n", 2.0) == (options.frontend.namespace, options.frontend.policy.overlap_weight)
    assert options.chooses_events()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], ""),
        (["--no-kv-events"], "--no-use-kv-events"),
        (["--no-use-kv-events"], "--no-use-kv-events"),
        (["--tokenizer=none"], "--tokenizer none"),
        (["--tokenizer=remote"], ""),
    ],
)
def test_no_events(flags: list[str], why: str) -> None:
    """The flags show why the frontends do not use events."""
    assert why == parse(*flags).no_events()


def test_any_port() -> None:
    """Port 0 lets every replica pick one."""
    assert [(0, 0), (0, 0)] == parse("--port", "0", "--replicas", "2").ports()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--router-mod", "kv"], "--router-mod: no such setting; did you mean --router-mode?"),
        (["--router-mode", "best"], "--router-mode 'best': must be "),
        (["--replicas", "0"], "--replicas '0': must be a whole number of at least 1"),
        (["--processes", "2"], "--processes: kvrouter serve starts several replicas with --replicas"),
        (["stray"], "'stray': not a flag"),
    ],
)
def test_wrong_flags(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong flag of any part ends the start with one line."""
    assert 2 == main([ENGINE, *flags])

    assert capsys.readouterr().err.startswith(f"kvrouter serve: {said}")


def test_settings_of_a_file_reach_the_children(tmp_path: Path) -> None:
    """[serve] is passed on as flags, [frontend] is left to the frontends, and the agents get both."""
    file = tmp_path / "kvrouter.toml"
    file.write_text(
        "[serve]\nreplicas = 2\nrouter-mode = 'random'\nlog-level = 'debug'\n"
        "[frontend]\nnamespace = 'n'\nport = 9000\nprocesses = 4\nrouter-replica-sync = false\n"
    )
    options = parse(f"--config={file}")

    assert [(9000, 9100), (9001, 9101)] == options.ports()
    assert ("random", "n", "debug") == (
        options.frontend.router_mode, options.frontend.namespace, options.frontend.log_level,
    )  # fmt: skip
    assert {
        f"--config={file}", "--processes=1", "--router-mode=random", "--log-level=debug",
        "--no-router-replica-sync",
    } == set(options.frontend_flags)  # fmt: skip
    assert {f"--config={file}", "--namespace=n", "--log-level=debug"} == set(options.agent_settings)


def test_what_does_not_fit() -> None:
    """Flags that contradict each other are rejected."""
    with pytest.raises(ConfigError, match="--port 65535: 2 replicas would need ports above 65535"):
        parse("--port", "65535", "--admin-port", "0", "--replicas", "2")
    with pytest.raises(ConfigError, match="--admin-port 65535: 2 replicas would need ports above 65535"):
        parse("--port", "65435", "--replicas", "2")
    with pytest.raises(ConfigError, match="--kv-replay without --kv-events"):
        parse("--engine", "http://e:1,replay=tcp://e:2")
    with pytest.raises(ConfigError, match="use nats://HOST:PORT"):
        parse("--nats", "http://e:1")


def test_access_to_engines(tmp_path: Path) -> None:
    """Flags for access to engines are passed to the agents, too; the listeners' certificate is not."""
    authority, key = Authority(tmp_path), tmp_path / "api-key"
    key.write_text("secret")
    files, ca = authority.sign(), authority.file
    options = parse(
        f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--worker-tls-ca={ca}",
        "--engine-api-key-file", str(key),
    )  # fmt: skip
    agent = options.agent(options.engines[0])

    assert (ca, "secret") == (agent.tls_ca, agent.api_key)
    assert (files, ca) == (options.frontend.tls.files, options.frontend.tls.worker_ca)
    with pytest.raises(ConfigError, match="--tls-cert without --tls-key"):
        parse(f"--tls-cert={files.cert}")


def test_state_dir_that_is_none(tmp_path: Path) -> None:
    """The error names the flag that the operator gave, not that of an agent made from it."""
    (tmp_path / "file").touch()
    for wrong in ("missing", "missing/deeper", "file", "file/below"):
        with pytest.raises(ConfigError, match=r"^--state-dir .*: give a directory that exists$"):
            parse("--state-dir", str(tmp_path / wrong))

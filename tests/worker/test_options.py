"""The agent's flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvrouter.errors import ConfigError
from kvrouter.settings.read import load
from kvrouter.worker import settings
from kvrouter.worker.options import AgentOptions, read_endpoints, worker_id_of
from kvrouter.worker.settings import COMMAND


def options(*words: str) -> AgentOptions:
    """The options of this command line, without the environment."""
    return load(COMMAND, words, {}).settings.agent()


def read(*flags: str) -> AgentOptions:
    """The options in these flags, of an agent with an engine."""
    return options("--engine-url", "http://127.0.0.1:25100", *flags)


def test_defaults() -> None:
    """Without flags: one rank, no events, an id of host and port."""
    options = read()

    assert ("127-0-0-1-25100", 1, []) == (options.worker_id, options.ranks, options.endpoints)
    assert (0.010, 1.0) == (options.flush_s, options.heartbeat_s)


@pytest.mark.parametrize(
    ("url", "worker_id"),
    [
        ("http://gpu-7.local:8000/", "gpu-7-local-8000"),
        ("https://engine", "engine-443"),
        ("http://[::1]:80", "--1-80"),
        ("http://gate:8000/engine-1/", "gate-8000-engine-1"),
        ("https://gate/a/B%2fc", "gate-443-a-B-2fc"),
    ],
)
def test_worker_id(url: str, worker_id: str) -> None:
    """The default worker id contains only allowed characters."""
    assert worker_id == worker_id_of(url)


@pytest.mark.parametrize(
    ("flags", "worker_id"),
    [
        (("--engine-url", "http://0.0.0.0:8000"), "here-8000"),
        (("--engine-url", "http://[::]:8000"), "here-8000"),
        (("--advertise-url", "http://10.0.0.2:9000"), "10-0-0-2-9000"),
        (("--advertise-url", "http://10.0.0.2:9000", "--worker-id", "mine"), "mine"),
    ],
)
def test_worker_ids_of_several_hosts(
    flags: tuple[str, ...], worker_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags that are equal on all hosts make different workers, as long as others can reach them."""
    monkeypatch.setattr(settings, "gethostname", lambda: "here")

    assert worker_id == read(*flags).worker_id


def test_long_paths() -> None:
    """Engines behind one gateway, or several, have different ids, however long and alike their paths are."""
    urls = [f"http://{host}:1/{start}/{'long-' * 20}" for host in ("g1", "g2") for start in ("a", "b")]

    ids = {worker_id_of(url) for url in urls}

    assert len(urls) == len(ids)
    assert all(len(one) == 64 for one in ids)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "use http://HOST:PORT"),
        ("HTTP://e:1", "use http://HOST:PORT"),
        (" http://e:1", "use http://HOST:PORT"),
        ("http://e:", "use http://HOST:PORT"),
        ("http://e:0/a", "use http://HOST:PORT"),
        ("http://e:99999/a", "out of range"),
        ("http://e/a?b=c", "without a query or fragment"),
        ("http://e/a?", "without a query or fragment"),
        ("http://e/a#", "without a query or fragment"),
        ("http://me:secret@e/a", "without a user and password"),
        ("http://e/a b", "' ' in its path: write it as %XX"),
        ("http://e/a\tb", "in its path: write it as %XX"),
        ("http://e/ä", "'ä' in its path: write it as %XX"),
        ("http://e/50%", "'%' in its path: write it as %XX"),
        ("http://e/a/../b", "without '.' and '..'"),
        ("http://e/%2E%2e/b", "without '.' and '..'"),
        ("http://e/" + "a" * 512, "at most 512 characters"),
        ("http://e/v1", "without /v1"),
        ("http://e/openai/v1//", "without /v1"),
    ],
)
def test_bad_url(url: str, said: str) -> None:
    """A URL behind which a request's path cannot be put is rejected with the way out."""
    for flags in (("--engine-url", url), ("--engine-url", "http://e", "--advertise-url", url)):
        with pytest.raises(ConfigError, match=re.escape(said)) as refused:
            options(*flags)

        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "whole"),
    [
        ((), None),
        (("--whole",), True),
        (("--whole=true",), True),
        (("--whole-requests",), True),
        (("--no-whole",), False),
        (("--whole=false",), False),
        (("--no-whole-requests",), False),
    ],
)
def test_whole(flags: tuple[str, ...], whole: bool | None) -> None:
    """Whether an engine computes whole requests is said by the engine itself, unless a flag says it."""
    assert whole is read(*flags).whole


PAIR = ("--role=prefill", "--kv-connector=nixl", "--kv-address=[::1]:5710")


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ((), (None, "", 0, "", "")),
        (("--role=both", "--whole"), ("both", "", 0, "", "")),
        ((*PAIR, "--bootstrap-port=8998", "--kv-hash=a"), ("prefill", "nixl", 8998, "[::1]:5710", "a")),
    ],
)
def test_roles(flags: tuple[str, ...], shown: tuple[str | None, str, int, str, str]) -> None:
    """The half of a prefill/decode pair, and how it hands over."""
    options = read(*flags)

    assert shown == (
        options.role,
        options.kv_connector,
        options.bootstrap_port,
        options.kv_address,
        options.kv_hash,
    )


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--role=prefil", "must be both, prefill or decode; did you mean"),
        ("--kv-connector=nixl-push", "'nixl-push' is not served: a second use of its parameters hangs"),
        ("--kv-connector=lmcache", "'lmcache' is not served yet; use nixl or mooncake or example"),
        ("--kv-connector=p2pnccl", "'p2pnccl' is unknown; use nixl or mooncake or example"),
        ("--kv-connector=", "'' is unknown"),
        ("--bootstrap-port=65536", "--bootstrap-port"),
        *((f"--kv-address={text}", "must be HOST:PORT") for text in ("", "h", "h:0", "h:65536", "u@h:1")),
    ],
)
def test_bad_roles(flag: str, said: str) -> None:
    """A wrong value is refused with the right ones."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(flag)


@pytest.mark.parametrize(
    ("flag", "scheme"), [("--engine-url", "http"), ("--advertise-url", "https"), ("--engine-url", "ftp")]
)
@pytest.mark.parametrize("user", ["u:secret", "secret", "u:se/cret"])
@pytest.mark.parametrize("rest", ["h", "h:1/a", "h:99999", "h:port", "[::1", "[::1]:x/a?b#c"])
def test_password_in_a_url(flag: str, scheme: str, user: str, rest: str) -> None:
    """A URL with credentials is refused, and the message does not show them, whatever else is wrong."""
    with pytest.raises(ConfigError, match="without a user and password") as refused:
        options("--engine-url=http://h:1", f"{flag}={scheme}://{user}@{rest}")

    assert not re.search("secret|se/|cret", str(refused.value))


def test_ranks_from_the_first_port() -> None:
    """From one endpoint, rank r's port is r higher, for events and replay."""
    feeds = read("--kv-events", "tcp://e:5557", "--kv-replay", "tcp://e:5657", "--dp-size", "2").endpoints

    assert [("tcp://e:5557", "tcp://e:5657"), ("tcp://e:5558", "tcp://e:5658")] == [
        (feed.events, feed.replay) for feed in feeds
    ]


def test_ranks_listed() -> None:
    """Endpoints may be listed, one per rank."""
    options = read("--kv-events", "tcp://e:1,tcp://e:5")

    assert (2, ["tcp://e:1", "tcp://e:5"]) == (options.ranks, [feed.events for feed in options.endpoints])


@pytest.mark.parametrize(
    ("events", "replay", "ranks"),
    [
        (None, "tcp://e:1", None),
        ("tcp://e:1,tcp://e:2", None, 3),
        ("tcp://e:1,tcp://e:2", "tcp://e:3,tcp://e:4,tcp://e:5", None),
        ("ipc:///tmp/e", None, 2),
        (",", None, None),
    ],
)
def test_endpoints_that_do_not_fit(events: str | None, replay: str | None, ranks: int | None) -> None:
    """Endpoints that do not fit the number of ranks are rejected."""
    with pytest.raises(ConfigError):
        read_endpoints(events, replay, "", ranks)


def test_labels_and_key(tmp_path: Path) -> None:
    """Labels are pairs; the API key is the content of a file."""
    path = tmp_path / "key"
    path.write_text("secret\n")

    options = read("--label", "zone=a", "--label", "node=n=1", "--engine-api-key-file", str(path))

    assert ({"zone": "a", "node": "n=1"}, "secret") == (options.labels, options.api_key)


def test_metrics() -> None:
    """Additional series, each with a name."""
    options = read("--metric", "preempted=vllm:num_preemptions_total", "--metric", "_q9=up")

    assert {"preempted": "vllm:num_preemptions_total", "_q9": "up"} == options.metrics


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["vllm:up"], "use NAME=SERIES"),
        (["a b=up"], "use NAME=SERIES"),
        (['a=up{engine="0"}'], "use NAME=SERIES"),
        (["a=up", "a=down"], "'a' is given twice"),
        ([f"m{number}=up" for number in range(17)], "given 17 times: a heartbeat carries 16 at most"),
    ],
)
def test_bad_metrics(given: list[str], words: str) -> None:
    """An invalid name or series, a repeated name, and too many are rejected."""
    with pytest.raises(ConfigError, match=words):
        read(*(argument for text in given for argument in ("--metric", text)))


def test_bad_label_and_key() -> None:
    """A label without a value and a missing file are rejected."""
    with pytest.raises(ConfigError, match="must be KEY=VALUE"):
        read("--label", "zone")
    with pytest.raises(ConfigError, match="No such file"):
        read("--engine-api-key-file", "/nowhere/key")


def test_state_file(tmp_path: Path) -> None:
    """By default no state is saved."""
    assert read().state_file is None
    assert tmp_path / "state" == read("--state-file", str(tmp_path / "state")).state_file


@pytest.mark.parametrize(
    ("words", "environ", "given"),
    [
        (["--kv-repair"], {}, "--kv-repair"),
        (["--no-kv-repair"], {}, "--kv-repair"),
        ([], {"KVROUTER_KV_REPAIR": "off"}, "--kv-repair, from KVROUTER_KV_REPAIR,"),
    ],
)
def test_a_retired_flag(words: list[str], environ: dict[str, str], given: str) -> None:
    """Report repair is gone: the flag is one warning, which says what to use."""
    (warning,) = load(COMMAND, ["--engine-url", "http://a", *words], environ).warnings

    assert warning.startswith(f"{given} is ignored: ")
    assert "--state-file" in warning


@pytest.mark.parametrize("path", ["/nowhere/state", "/"])
def test_bad_state_file(path: str) -> None:
    """A state file that cannot be written is rejected at once, with the flag."""
    with pytest.raises(ConfigError, match=f"--state-file {path}"):
        read("--state-file", path)

"""`--engines FILE`: its content, and the errors for a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrouter.errors import ConfigError
from kvrouter.settings.read import load
from kvrouter.worker.engines_file import EngineList, read_engines
from kvrouter.worker.settings import COMMAND

TWO_PODS = """
[[engine]]
engine-url = "http://10.0.0.1:8000"
label = ["zone=a", "node=1"]

[[engine]]
engine-url = "http://10.0.0.2:8000"
kv-topic = "kv@10.0.0.2@Qwen/Qwen3-32B"
worker-id = "second"
dp-size = 2
kv-replay = "tcp://10.0.0.2:5657"
kv-repair = false
"""


def read(path: Path, *flags: str) -> EngineList:
    """The options in a file, with these flags."""
    return read_engines(load(COMMAND, ["--engines", str(path), *flags], {}), path)


def written(directory: Path, text: str, name: str = "engines.toml") -> Path:
    """A file with this text."""
    path = directory / name
    path.write_text(text)
    return path


def test_entries(tmp_path: Path) -> None:
    """A flag holds for every engine whose entry does not set it."""
    flags = ("--kv-events", "tcp://*:5557", "--kv-topic", "kv@", "--label", "rack=r", "--probe-s", "2")
    first, second = read(written(tmp_path, TWO_PODS), *flags).agents

    assert ("10-0-0-1-8000", "second") == (first.worker_id, second.worker_id)
    assert [("tcp://*:5557", None, "kv@10.0.0.1@")] == [
        (f.events, f.replay, f.topic) for f in first.endpoints
    ]
    assert [
        ("tcp://*:5557", "tcp://10.0.0.2:5657", "kv@10.0.0.2@Qwen/Qwen3-32B"),
        ("tcp://*:5558", "tcp://10.0.0.2:5658", "kv@10.0.0.2@Qwen/Qwen3-32B"),
    ] == [(feed.events, feed.replay, feed.topic) for feed in second.endpoints]
    assert [{"rack": "r", "zone": "a", "node": "1"}, {"rack": "r"}] == [
        dict(first.labels),
        dict(second.labels),
    ]
    assert [2.0, 2.0] == [agent.probe_s for agent in (first, second)]


def test_a_retired_key(tmp_path: Path) -> None:
    """It is one warning, however many entries have it."""
    text = TWO_PODS.replace('node=1"]', 'node=1"]\nkv-repair = true')
    (warning,) = read(written(tmp_path, text), "--kv-events", "tcp://*:5557").warnings

    assert warning.startswith(f"{tmp_path / 'engines.toml'}: kv-repair is ignored: ")


def test_shared_endpoints(tmp_path: Path) -> None:
    """A bound endpoint has one socket for all its engines; --kv-topic filters all of it."""
    engines = read(written(tmp_path, TWO_PODS), "--kv-events", "tcp://*:5557", "--kv-topic", "kv@")

    assert "kv@" == engines.topic_filter
    assert {
        "tcp://*:5557": ("kv@10.0.0.1@", "kv@10.0.0.2@Qwen/Qwen3-32B"),
        "tcp://*:5558": ("kv@10.0.0.2@Qwen/Qwen3-32B",),
    } == engines.shared


def test_separate_endpoints(tmp_path: Path) -> None:
    """Engines with separate endpoints, to which the agent connects, need no topic."""
    text = "".join(
        f'[[engine]]\nengine-url = "http://e{n}:80"\nkv-events = "tcp://e{n}:5557"\n' for n in (1, 2)
    )
    engines = read(written(tmp_path, text))

    assert {} == engines.shared
    assert ["", ""] == [agent.endpoints[0].topic for agent in engines.agents]


def test_json(tmp_path: Path) -> None:
    """The same as JSON."""
    content = {"engine": [{"engine-url": "http://e:80", "max-num-seqs": 7}]}
    (agent,) = read(written(tmp_path, json.dumps(content), "engines.json")).agents

    assert ("e-80", 7) == (agent.worker_id, agent.max_sequences)


@pytest.mark.parametrize(
    ("flags", "key", "whole"),
    [
        ((), "", None),
        ((), "whole = true", True),
        ((), "whole = false", False),
        ((), "whole-requests = true", True),
        (("--whole",), "", True),
        (("--whole",), "whole = false", False),
        (("--no-whole",), "whole = true", True),
    ],
)
def test_whole(tmp_path: Path, flags: tuple[str, ...], key: str, whole: bool | None) -> None:
    """An entry states whether its engine computes whole requests; a flag states it for all others."""
    path = written(tmp_path, f"[[engine]]\nengine-url = 'http://e'\n{key}\n")

    assert whole is read(path, *flags).agents[0].whole


def test_roles(tmp_path: Path) -> None:
    """Each entry has its half of a pair."""
    entry = "[[engine]]\nengine-url = 'http://{0}'\nrole = '{0}'\nkv-connector = 'nixl'\nbootstrap-port = 1\n"
    path = written(tmp_path, entry.format("prefill") + entry.format("decode"))

    agents = read(path, "--role=both", "--whole").agents

    assert ["prefill", "decode"] == [agent.role for agent in agents]
    assert {("nixl", 1)} == {(agent.kv_connector, agent.bootstrap_port) for agent in agents}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"give one \[\[engine\]\] table for each engine"),
        ("engine = 3", r"give one \[\[engine\]\] table"),
        ("[[engine]", "is not valid TOML"),
        ('port = 1\n[[engine]]\nengine-url = "http://e:1"', "unknown key 'port'"),
        ("[[engine]]\nmodel = 'm'", r"engine 1 \(no engine-url\): --engine-url is missing"),
        ("[[engine]]\nengine-url = 'e'", r"engine 1 \(e\): --engine-url: url 'e': use http://HOST:PORT"),
        ("[[engine]]\nengine-url = 'http://e'\nurl = 'x'", r"engine 1 .*'url': no such setting"),
        ("[[engine]]\nengine-url = 'http://e'\ndp-size = 0", r"dp-size = '0': must be a whole number"),
        ("[[engine]]\nengine-url = 'http://e'\nnats = 'x'", r"'nats' is a setting of the whole process"),
        ("[[engine]]\nengine-url = 'http://e'\nlabel = [[1]]", r"'label' must be text or a number"),
        (
            "[[engine]]\nengine-url = 'http://e'\n" * 2,
            r"engine 2 .*worker-id 'e-80' is already used by .*engine 1",
        ),
        (
            "[[engine]]\nengine-url = 'http://e:1'\nkv-events = 'tcp://*:5'\n"
            "[[engine]]\nengine-url = 'http://e:2'\nkv-events = 'tcp://*:5'\n",
            r"engine 2 .*kv-topic 'kv@e@' is already used by .*engine 1",
        ),
        (
            "[[engine]]\nengine-url = 'http://e:1'\nkv-events = 'tcp://p:5'\n"
            "[[engine]]\nengine-url = 'http://e:2'\nkv-events = 'tcp://p:5'\n",
            r"engine 1 .*kv-topic is missing: several engines may publish on tcp://p:5",
        ),
    ],
)
def test_rejected(tmp_path: Path, text: str, message: str) -> None:
    """A mistake is reported with the entry and the key."""
    with pytest.raises(ConfigError, match=message):
        read(written(tmp_path, text))


def test_no_file() -> None:
    """A missing file is reported."""
    with pytest.raises(ConfigError, match="--engines /nowhere: No such file"):
        read(Path("/nowhere"))


def test_flags_of_one_engine(tmp_path: Path) -> None:
    """A flag that only one engine can have is rejected on the command line."""
    with pytest.raises(ConfigError, match="belong in the entries"):
        read(written(tmp_path, TWO_PODS), "--worker-id", "w")


def test_too_many(tmp_path: Path) -> None:
    """The number of engines in a process is limited."""
    text = "".join(f'[[engine]]\nengine-url = "http://e:{port}"\n' for port in range(1, 1026))
    with pytest.raises(ConfigError, match="at most 1024"):
        read(written(tmp_path, text))

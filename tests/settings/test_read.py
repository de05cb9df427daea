"""What a reading of settings gives, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import pytest

from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Command, Settings, setting
from kvrouter.settings.read import PageAsked, load


@dataclass(frozen=True, slots=True)
class Queue(Settings):
    heading = "Queue"

    size: int = setting(10, "most that wait", name="queue-size", least=1)
    wait_s: float = setting(1.5, "seconds", name="queue-wait-s", above=0, old=("--queue-wait-secs",))


@dataclass(frozen=True, slots=True)
class Options(Settings):
    port: int = setting(8000, "port", least=0, most=65535, old=("--http-port",), is_top=True)
    mode: Literal["kv", "random"] = setting(
        "kv", "how to choose", name="router-mode", former={"lru": "use kv"}, is_top=True
    )
    weight: float | Literal["auto"] = setting(1.0, "of overlap", least=0, reloadable=True)
    events: bool = setting(True, "use events", name="use-events", old=("--no-kv-events",))
    synced: bool | None = setting(None, "share bookings")
    model_path: tuple[str, ...] = setting((), "directories")
    servers: tuple[str, ...] = setting(
        ("nats://a",),
        "of NATS",
        name="nats",
        read=lambda text: tuple(text.split(",")),
        text=",".join,
        variable="NATS_URL",
    )
    key: str = setting("", "of clients", is_secret=True)
    file: Path | None = setting(None, "to read")
    number: int = setting(0, "of this process", is_hidden=True)
    queue: Queue = field(default_factory=Queue)

    def checked(self) -> Self:
        if self.port == 1 and self.queue.size > 10:
            raise ConfigError("--port 1 needs a --queue-size of at most 10")
        return self


COMMAND = Command("nats", Options, "Nothing.", removed={"old-flag": "use --port"})


def read(*words: str, **environ: str) -> Options:
    return load(COMMAND, words, environ).settings


def refusal(*words: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load(COMMAND, words, environ)
    return str(raised.value)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--port 80", "port", 80),
        ("--port=80", "port", 80),
        ("--http-port=80", "port", 80),
        ("--port 80 --port 81", "port", 81),
        ("--router-mode random", "mode", "random"),
        ("--weight auto", "weight", "auto"),
        ("--weight 0", "weight", 0.0),
        ("--no-kv-events", "events", False),
        ("--no-use-events", "events", False),
        ("--no-use-events --use-events", "events", True),
        ("--use-events=off", "events", False),
        ("--synced", "synced", True),
        ("--no-synced", "synced", False),
        ("--model-path a --model-path b=c", "model_path", ("a", "b=c")),
        ("--model-path=-a", "model_path", ("-a",)),
        ("--nats a,b --nats c,d", "servers", ("c", "d")),
        ("--file x", "file", Path("x")),
        ("--number 3", "number", 3),
    ],
)
def test_a_flag_sets_its_field(words: str, name: str, value: Any) -> None:
    """Both forms of a value work, old spellings too; of several the last one counts, unless it is a list."""
    assert value == getattr(read(*words.split()), name)


def test_nested_settings() -> None:
    """A setting of a nested class is a flag like any other."""
    assert Queue(3, 2.0) == read("--queue-size=3", "--queue-wait-secs=2").queue


def test_precedence(tmp_path: Path) -> None:
    """A flag has precedence over the environment, that over the file, that over the default."""
    file = tmp_path / "c.toml"
    file.write_text(
        "[nats]\nport = 3\nweight = 3\nrouter_mode = 'random'\n[shared]\nqueue-size = 7\nport = 9\n"
    )

    loaded = load(
        COMMAND, ["--port=1"], {"KVROUTER_CONFIG": str(file), "KVROUTER_PORT": "2", "KVROUTER_WEIGHT": "2"}
    )

    assert (1, 2.0, "random", 7) == (
        loaded.settings.port,
        loaded.settings.weight,
        loaded.settings.mode,
        loaded.settings.queue.size,
    )
    assert {
        "port": "flag",
        "weight": "KVROUTER_WEIGHT",
        "router-mode": f"{file} [nats]",
        "queue-size": f"{file} [shared]",
    } == loaded.sources
    assert ["--port=1", "--router-mode=random"] == loaded.passed_on("worker", loaded.values)


def test_variables() -> None:
    """Lists are separated by spaces, switches are on or off, and a further variable comes second."""
    options = read(
        KVROUTER_MODEL_PATH="a b", KVROUTER_USE_EVENTS="off", NATS_URL="nats://b", KVROUTER_PORT=""
    )

    assert (("a", "b"), False, ("nats://b",), 8000) == (
        options.model_path,
        options.events,
        options.servers,
        options.port,
    )
    assert ("c",) == read(KVROUTER_NATS="c", NATS_URL="nats://b").servers


def test_the_variables_of_a_kubernetes_service() -> None:
    """Those that Kubernetes sets for a Service named kvrouter are neither settings nor worth a warning."""
    loaded = load(
        COMMAND,
        [],
        {
            "KVROUTER_PORT": "tcp://10.0.0.1:8000",
            "KVROUTER_SERVICE_HOST": "10.0.0.1",
            "KVROUTER_PORT_8000_TCP_ADDR": "10.0.0.1",
        },
    )

    assert (8000, []) == (loaded.settings.port, loaded.warnings)


def test_an_unknown_variable() -> None:
    """It is a warning that names the nearest one, as another program may have set it."""
    loaded = load(COMMAND, [], {"KVROUTER_PROT": "1", "KVROUTER_NUMBER": "2", "PORT": "3"})

    assert (8000, 0) == (loaded.settings.port, loaded.settings.number)
    assert "KVROUTER_PROT is ignored: no such setting; did you mean KVROUTER_PORT?" in loaded.warnings[1]


def test_the_variable_of_a_removed_flag() -> None:
    """It is a warning with the remedy of the flag."""
    (warning,) = load(COMMAND, [], {"KVROUTER_OLD_FLAG": "1"}).warnings

    assert "the variable KVROUTER_OLD_FLAG is ignored: use --port" == warning


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--prt 8", "--prt: no such setting; did you mean --port?"),
        ("--router-mod kv", "--router-mod: no such setting; did you mean --router-mode?"),
        ("--port x", "--port 'x': must be a whole number from 0 to 65535"),
        ("--port 1_000", "--port '1_000': must be a whole number from 0 to 65535"),
        ("--port=-1", "--port '-1': must be a whole number from 0 to 65535"),
        ("--port", "--port: give N: port"),
        ("--router-mode kvv", "--router-mode 'kvv': must be kv or random; did you mean kv?"),
        ("--router-mode lru", "--router-mode 'lru': removed; use kv"),
        ("--weight nan", "--weight 'nan': must be auto or a number of at least 0"),
        ("--weight aut", "--weight 'aut': must be auto or a number of at least 0; did you mean auto?"),
        ("--queue-wait-s 0", "--queue-wait-s '0': must be a number above 0"),
        ("--queue-wait-secs 0", "--queue-wait-s '0': must be a number above 0"),
        ("--use-events=perhaps", "--use-events=perhaps: must be on or off"),
        ("--file=", "--file '': must be a path"),
        ("kv", "'kv': not a flag, and no flag takes it as its value"),
        ("--no-port", "--no-port: no such setting; did you mean --port?"),
        ("--old-flag=3", "--old-flag: use --port"),
        ("--config", "--config: give a file"),
        ("--config /nowhere", "--config /nowhere: No such file or directory"),
        ("--show-config=1", "--show-config: takes no value"),
        ("--empty", "--empty: no such setting; --help-all lists all"),
        ("--Port 3", "--Port: no such setting; did you mean --port?"),
        ("--router-mode KV", "--router-mode 'KV': must be kv or random; did you mean kv?"),
        ("--port 1 --queue-size 11", "--port 1 needs a --queue-size of at most 10"),
    ],
)
def test_wrong_words(words: str, message: str) -> None:
    """A refusal names what was given, what it may be, and the nearest right one."""
    assert message == refusal(*words.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prt = 3", "{file}: [nats] prt: no such setting; did you mean port?"),
        ("port = 'x'", "{file}: [nats] port = 'x': must be a whole number from 0 to 65535"),
        ("port = 8.5", "{file}: [nats] port = '8.5': must be a whole number from 0 to 65535"),
        ("port = [1]", "{file}: [nats] port: must be one value"),
        ("model-path = [[1]]", "{file}: [nats] model-path: must be a list of texts"),
        ("number = 3", "{file}: [nats] number: no such setting"),
        ("http-port = 1", "{file}: [nats] http-port: no such setting; did you mean port?"),
        ("no-use-events = true", "{file}: [nats] no-use-events: no such setting; did you mean use-events?"),
        ("port =", "--config {file}: it is not TOML: Invalid value (at line 2, column 7)"),
        ("[frontent]", "{file}: [frontent]: no such command; did you mean frontend?"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    """A refusal names file, table and key."""
    file = tmp_path / "c.toml"
    file.write_text(f"[nats]\n{text}\n")

    assert refusal("--config", str(file)).startswith(message.format(file=file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a = {'[' * 5000}{']' * 5000}", "it is not TOML: brackets are nested too deeply"),
        (f"[nats]\nport = {'9' * 5000}", "it is not TOML: Exceeds the limit"),
        (f"[nats]\nport = 0x{'9' * 5000}", "[nats] port: the number has too many digits"),
    ],
)
def test_files_of_no_sense(tmp_path: Path, text: str, message: str) -> None:
    """What the TOML reader itself cannot hold is one line, too."""
    file = tmp_path / "c.toml"
    file.write_text(text)

    assert message in refusal("--config", str(file))


def test_a_file_of_windows(tmp_path: Path) -> None:
    """A byte-order mark and its line ends are no part of the text."""
    file = tmp_path / "c.toml"
    file.write_bytes(b"\xef\xbb\xbf[nats]\r\nport = 3\r\n")

    assert 3 == read("--config", str(file)).port


def test_a_wrong_variable() -> None:
    """A refusal names the variable."""
    assert "KVROUTER_PORT=x: must be a whole number from 0 to 65535" == refusal(KVROUTER_PORT="x")


def test_show_config_prints_no_secret() -> None:
    """Values come with their sources, without secrets and passwords of URLs."""
    with pytest.raises(PageAsked) as raised:
        read("--show-config", "--key=abc", "--port=3", NATS_URL="nats://u:p/w@h,nats://u:p@i")

    rows = {line.split()[0]: line.split()[1:] for line in str(raised.value).splitlines()}
    assert ["(secret)", "flag"] == rows["key"]
    assert ["3", "flag"] == rows["port"]
    assert ["nats://h,nats://i", "NATS_URL"] == rows["nats"]
    assert ["-", "default"] == rows["file"]
    assert "number" not in rows


def test_show_config_of_settings_that_do_not_fit() -> None:
    """The page comes all the same, with the problem and what is ignored: it is to find such mistakes."""
    with pytest.raises(PageAsked) as raised:
        read("--show-config", "--queue-size=11", KVROUTER_PORT="1", KVROUTER_PROT="3")

    assert ["port", "1", "KVROUTER_PORT"] in [line.split() for line in str(raised.value).splitlines()]
    problem = "--port 1 needs a --queue-size of at most 10 (--port comes from KVROUTER_PORT)"
    assert problem == raised.value.problem
    assert ["KVROUTER_PROT is ignored" in line for line in raised.value.warnings] == [True]


def test_help_lists_what_matters_and_help_all_the_rest() -> None:
    """--help lists the first settings only; neither lists those for child processes."""
    pages = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(PageAsked) as raised:
            read(flag, "--prt")
        pages.append(str(raised.value))

    assert ["--port N" in page for page in pages] == [True, True]
    assert ["--queue-size N" in page for page in pages] == [False, True]
    assert not any("--number" in page for page in pages)
    assert "--[no-]use-events" in pages[1]


def test_reading_again(tmp_path: Path) -> None:
    """A second reading has the file's values of then, and says which settings changed."""
    file = tmp_path / "c.toml"
    file.write_text("[nats]\nweight = 1\n")
    first = load(COMMAND, ["--port=3", f"--config={file}"], {})
    file.write_text("[nats]\nweight = 2\nport = 4\n")

    second = first.reread()

    assert (2.0, 3) == (second.settings.weight, second.settings.port)
    assert ["weight"] == [one.name for one in first.changes(second)]

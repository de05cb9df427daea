"""Settings written as flags, or as a config file, are read back as the same settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvrouter.settings import read
from kvrouter.settings.commands import MODULES, command_named
from kvrouter.settings.declare import Declared
from tests.long import IS_LONG

# No newline and no surrogate: neither is in a flag that a person writes, nor in a text of TOML.
TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_characters="\x7f"), max_size=12)
SAMPLES = {
    "admin-allowed-host": ["a.example", "10.0.0.7", "[::1]"],
    "agent": ["w", "w=a+b-1"],
    "advertise": ("router-0", "10.0.0.5", "fd00::5"),
    "cache": ["0.5", "0.25,2"],
    "engine": ["http://a:1", "http://a:1,kv=tcp://a:2,replay=tcp://a:3,id=w,label.zone=b"],
    "expose": ["none", "headers", "metrics,headers"],
    "fail": ["w3@60", "w1@0,w22@1.5"],
    "join": ["1", "0.5,2"],
    "ignore": ["nats.slow", "clock.skew"],
    "imbalanced-threshold": ["10", "2.5", "inf"],
    "kv-replay": ["w=tcp://a:1", "w=tcp://a:1,tcp://a:2"],
    "kv-address": ["a:1", "[::1]:5710"],
    "kv-connector": ["nixl", "example"],
    "label": ["zone=a", "zone=a=b"],
    "live": ["http://a:1", "https://a:1"],
    "load": ["0.5", "0.5,1.5"],
    "max-body-mib": ["1", "65"],
    "model-alias": ["a=m", "b=org/m=1"],
    "model-path": ["/m", "name=/m"],
    "namespace": ["a", "A_b-9"],
    "nats": ["nats://a:1", "nats://a:1,nats://b:2", "tls://a:1", "embedded"],
    "otlp-endpoint": ["http://127.0.0.1:4318", "https://collector/v1/traces"],
    "pace": ["1", "0.5,2"],
    "pd-same-label": ["zone", "rack"],
    "prefix-store-mib": ["1", "513"],
    "tokenizer-queue-mib": ["1", "513"],
    "replica": ["http://a:1", "http://b:2"],
    "root-path": ["/a", "/api/llm-1"],
    "router-mode": ["kv", "kv:2"],
    "session-header": ["x-a"],
    "speeds": ["1", "1,0.5"],
    "stage-one": ["hash", "round-robin", "header:x-a"],
    "stages": ["3x20", "46x25!,0x60,3x20"],
    "sync-ms": ["0.5", "2.5"],
    "tool": ["t", "grafana-1"],
    "caller": ["gateway-1", "gateway-2"],
    "trusted-proxies": ["127.0.0.1", "10.0.0.0/8", "fd00::/8"],
    "tenant": ["t", "team-1.x"],
    "expires": ["2027-01-31", "2027-01-31T12:00:00+02:00"],
    "url": ["nats://127.0.0.1:1", "nats://127.0.0.1:65535"],
    "workload": ["zero", "hot:prefixes=3"],
    "worker-id": ["w", "w-1_2"],
    "worker-networks": ["127.0.0.1", "10.0.0.0/8", "fd00::/8"],
}
"""Texts for settings with readers of their own."""


def values_of(one: Declared) -> st.SearchStrategy[Any]:
    """Any value that the type of a setting and its bounds allow."""
    setting = one.setting
    if setting.read is not None:
        value = st.sampled_from(SAMPLES[one.name]).map(one.read)
        return st.lists(value, min_size=1, max_size=3).map(tuple) if one.is_list else value
    if one.is_switch:
        return st.booleans()
    kinds = str(one.type)
    choices: list[st.SearchStrategy[Any]] = [st.sampled_from(one.choices)] if one.choices else []
    if "int" in kinds:
        least = max(setting.least or 0, math.floor(setting.above) + 1 if setting.above is not None else 0)
        choices.append(st.integers(int(least), int(setting.most or 2**53)))
    elif "float" in kinds:
        # Flags have 15 digits: whole hundredths are what people write.
        low = setting.above if setting.above is not None else setting.least or 0
        whole = st.integers(math.floor(low * 100) + 1, int(100 * (setting.most or 10**9)))
        choices.append(whole.map(lambda number: number / 100))
    elif "Path" in kinds:
        texts = TEXTS.filter(lambda text: text.strip() != "")
        if setting.is_positional:  # a word that begins with a dash is a flag: people write ./-name
            texts = texts.filter(lambda text: not text.startswith("-"))
        choices.append(texts.map(Path))
    elif not choices:
        choices.append(TEXTS)
    value = st.one_of(choices)
    return st.lists(value, min_size=1, max_size=3).map(tuple) if one.is_list else value


def settable(name: str) -> dict[str, Declared]:
    return {one.name: one for one in command_named(name).declared() if not one.setting.is_hidden}


@st.composite
def some_values(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Values for a few settings of a command, and for all that must be given."""
    all_of = settable(name)
    few = draw(st.lists(st.sampled_from(sorted(all_of)), max_size=6, unique=True))
    must = [key for key, one in all_of.items() if one.is_required and key not in few]
    return {key: draw(values_of(all_of[key])) for key in [*few, *must]}


def reread(name: str, words: list[str]) -> dict[str, Any]:
    """The values read, without the checks of settings against each other and the files that they name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read._SettingsReader, "_imply", lambda _reading, _values: None)
        patch.setattr(read, "built", lambda _kind, _declared, _values: None)
        return dict(read.load(command_named(name), words, {}).values)


@pytest.mark.parametrize("name", MODULES)
@settings(max_examples=15 if IS_LONG else 4, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_flags(name: str, data: st.DataObject) -> None:
    """Settings -> flags -> settings: the same, and the rest keeps its default."""
    values = data.draw(some_values(name))
    declared = settable(name)
    words = []
    for key in sorted(values, key=list(declared).index):  # words without flags have their order
        one, value = declared[key], values[key]
        values_of_one = value if one.is_list else (value,)
        is_word = one.setting.is_positional
        words += [one.text(each) for each in values_of_one] if is_word else one.flags(value)

    again = reread(name, words)

    defaults = {key: one.default for key, one in declared.items()}
    assert defaults | values == {key: again[key] for key in declared}


@pytest.mark.parametrize("name", MODULES)
@settings(max_examples=15 if IS_LONG else 4, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_file(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Settings -> config file -> settings."""
    values = {key: value for key, value in data.draw(some_values(name)).items() if value is not None}
    declared = settable(name)
    lines = [f"[{name}]"]
    for key, value in values.items():
        one = declared[key]
        items = [one.text(item) for item in (value if one.is_list else (value,))]
        texts = json.dumps(items if one.is_list else items[0])
        lines.append(f"{key} = {texts if not one.is_switch else str(value).lower()}")
    file = tmp_path_factory.mktemp("config") / "kvrouter.toml"
    file.write_text("\n".join(lines))

    again = reread(name, [f"--config={file}"])

    assert values == {key: again[key] for key in values}


@pytest.mark.parametrize("name", MODULES)
def test_samples(name: str) -> None:
    """Each sample is taken, and the text of its value gives the same value; no chance is involved."""
    own = [one for one in settable(name).values() if one.setting.read is not None]

    for one in own:
        values = [one.read(text) for text in SAMPLES[one.name]]
        assert values == [one.read(one.text(value)) for value in values]

"""The modes' flags: published defaults, a config file, and clear words for wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrouter.errors import ConfigError
from kvrouter.frontend.options import parse_options
from kvrouter.policies import PolicySettings, new_policy
from kvrouter.policies.kv import Kv
from kvrouter.policies.kv_score import KvScore
from kvrouter.policies.scored import Scored
from kvrouter.policies.two_stage import TwoStage


def test_published_defaults() -> None:
    """Without flags."""
    assert PolicySettings() == parse_options([]).policy


def test_each_flag_reaches_its_mode() -> None:
    """A mode is made with what was said."""
    numbers = {
        "--router-kv-overlap-score-credit-decay": "0.5", "--router-active-request-weight": "2",
        "--kv-gpu-cache-usage-weight": "3", "--kv-waiting-requests-weight": "0", "--stage-one": "hash",
        "--stage-one-blocks": "7", "--group-label": "pod",
    }  # fmt: skip
    said = parse_options([word for pair in numbers.items() for word in pair]).policy

    assert Kv(0.5, 2.0) == new_policy("kv", said)
    assert KvScore(3.0, 0.0) == new_policy("kv-score", said)
    assert TwoStage("hash", 7, "pod", Kv(0.5, 2.0)) == new_policy("two-stage", said)


def test_overlap_weight_is_the_modes_own_unless_said() -> None:
    """1 in kv, 2 in kv-score."""
    assert None is parse_options([]).overlap_weight
    assert 0.0 == parse_options(["--kv-overlap-score-weight", "0"]).overlap_weight


def test_router_config(tmp_path: Path) -> None:
    """Mode scored as the file says."""
    file = tmp_path / "picker.yaml"
    file.write_text(
        "kind: EndpointPickerConfig\n"
        "plugins: [{type: queue-scorer}, {type: no-hit-lru-scorer, parameters: {lruSize: 9}}]\n"
    )
    options = parse_options(["--router-config", str(file)])

    policy = new_policy("scored", options.policy)

    assert isinstance(policy, Scored)
    assert [("queue-scorer", 1.0), ("no-hit-lru-scorer", 1.0)] == [
        (one.name, one.weight) for one in policy.scorers
    ]
    assert ["no-hit-lru-scorer"] == [note.partition(":")[0] for note in options.policy_notes]


def test_wrong_router_config(tmp_path: Path) -> None:
    """The message names the file and what is wrong in it."""
    file = tmp_path / "picker.yaml"
    file.write_text("kind: EndpointPickerConfig\nplugins: [{type: queue-scorerr}]\n")

    with pytest.raises(ConfigError, match=r"picker\.yaml: plugin type 'queue-scorerr'"):
        parse_options(["--router-config", str(file)])
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        parse_options(["--router-config", str(tmp_path / "absent.yaml")])


@pytest.mark.parametrize(
    "flags", [["--sticky-hit-rate", "1.1"], ["--stage-one", "header:x"], ["--router-mode", "direct"]]
)
def test_wrong_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A share above 1, and what the request path does not hand over yet."""
    with pytest.raises(SystemExit):
        parse_options(flags)

    assert flags[0] in capsys.readouterr().err

"""Flags of the modes: documented defaults, a config file, and messages for wrong values."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrouter.core.routing.breaker import BreakerSettings
from kvrouter.core.routing.filters import FilterSettings
from kvrouter.core.routing.policy import AUTO
from kvrouter.core.tables.text_index import TextIndexSettings
from kvrouter.errors import ConfigError
from kvrouter.frontend.settings import COMMAND, RuleOptions, parse_options
from kvrouter.policies import POLICIES, PolicySettings, new_policy
from kvrouter.policies.kv import Kv
from kvrouter.policies.kv_score import KvScore
from kvrouter.policies.prefix_affinity import PrefixAffinity
from kvrouter.policies.scored import Scored
from kvrouter.policies.two_stage import TwoStage
from kvrouter.settings.read import PageAsked, load
from kvrouter.settings.reload import read_again
from tests.policies.test_endpoint_picker import HEIMDALL


def test_published_defaults() -> None:
    """Without flags."""
    assert PolicySettings() == parse_options([]).policy


def test_each_flag_reaches_its_mode() -> None:
    """Each flag reaches the policy of its mode."""
    numbers = {
        "--router-kv-overlap-score-credit-decay": "0.5", "--router-active-request-weight": "2",
        "--kv-gpu-cache-usage-weight": "3", "--kv-waiting-requests-weight": "0", "--stage-one": "hash",
        "--stage-one-blocks": "7", "--group-label": "pod",
    }  # fmt: skip
    said = parse_options([word for pair in numbers.items() for word in pair]).policy

    assert Kv(0.5, 2.0, AUTO) == new_policy("kv", said)
    assert KvScore(3.0, 0.0) == new_policy("kv-score", said)
    assert TwoStage("hash", 7, "pod", Kv(0.5, 2.0, AUTO)) == new_policy("two-stage", said)


def test_overlap_weight_defaults_to_that_of_the_mode() -> None:
    """1 in kv, 2 in kv-score."""
    assert None is parse_options([]).policy.overlap_weight
    assert 0.0 == parse_options(["--kv-overlap-score-weight", "0"]).policy.overlap_weight


def test_router_config(tmp_path: Path) -> None:
    """The file alone chooses mode scored."""
    file = tmp_path / "picker.yaml"
    file.write_text(
        "kind: EndpointPickerConfig\n"
        "plugins: [{type: queue-scorer}, {type: no-hit-lru-scorer, parameters: {lruSize: 9}}]\n"
    )
    options = parse_options(["--router-config", str(file)])

    policy = new_policy(options.router_mode, options.policy)

    assert isinstance(policy, Scored)
    assert [("queue-scorer", 1.0), ("no-hit-lru-scorer", 1.0)] == [
        (one.name, one.weight) for one in policy.scorers
    ]
    assert ["no-hit-lru-scorer"] == [note.partition(":")[0] for note in options.policy_notes]


def test_config_without_its_mode(tmp_path: Path) -> None:
    """Another --router-mode wins; a note reports that the file has next to no effect."""
    path = tmp_path / "picker.yaml"
    path.write_text("{kind: EndpointPickerConfig, plugins: [{type: queue-scorer}]}")
    flags = ["--router-config", str(path)]

    assert () == parse_options(flags).policy_notes
    (note,) = parse_options([*flags, "--router-mode", "kv"]).policy_notes
    assert note.startswith("the mode is kv: only requests with mode scored")


@pytest.fixture
def heimdall(tmp_path: Path) -> str:
    """The published file, as a flag."""
    (tmp_path / "heimdall.yaml").write_text(HEIMDALL)
    return f"--router-config={tmp_path / 'heimdall.yaml'}"


def test_indexer_config_has_the_defaults(heimdall: str) -> None:
    """Its values equal the settings that do the same; a setting that is given wins."""
    options = parse_options([heimdall, "--index-max-blocks=7", "--tokenizer-workers=2"])

    assert (500_000, 0.8) == (options.tokens.cache.max_parts, options.tokens.cache.enough)
    assert (Path("/tmp"), "hf_secret") == (options.tokens.cache_directory, options.tokens.hub_token)
    assert (32, 10) == (options.pool.block_size, options.pool.index_bounds.max_holders)
    assert (7, 2) == (options.pool.index_bounds.max_blocks, options.tokens.threads)
    assert options.policy_notes[0].startswith("the file has defaults of --prefix-store-blocks, --kv-cache-")


def test_block_sizes_that_contradict(heimdall: str) -> None:
    """The block size of the engines is a fact: another one is an error that names both settings."""
    assert 32 == parse_options([heimdall, "--kv-cache-block-size=32"]).pool.block_size
    with pytest.raises(
        ConfigError, match=r"tokenProcessorConfig\.blockSize 32 contradicts --kv-cache-block-size 16"
    ):
        parse_options([heimdall, "--kv-cache-block-size=16"])


def test_token_of_a_file_is_not_shown(heimdall: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in --show-config, notes or settings; $HF_TOKEN wins."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(PageAsked) as page:
        parse_options([heimdall, "--show-config"])
    (row,) = [line for line in str(page.value).splitlines() if line.startswith("hf-token")]

    assert ["(secret)", "--router-config", "tokenizersPoolConfig.huggingFaceToken"] == row.split()[1:]
    options = parse_options([heimdall])
    assert "hf_secret" not in f"{page.value} {options.policy_notes} {options}"
    monkeypatch.setenv("HF_TOKEN", "own")
    assert "own" == parse_options([heimdall]).tokens.hub_token


def test_changed_indexer_config(tmp_path: Path) -> None:
    """A reload uses the file's weights, and names what of its indexerConfig needs a restart."""
    file = tmp_path / "h.yaml"
    file.write_text(HEIMDALL)
    loaded = load(COMMAND, [f"--router-config={file}"], {})
    changed = HEIMDALL.replace("workersCount: 8", "workersCount: 9").replace("hf_secret", "hf_other")
    file.write_text(changed.replace("weight: 3", "weight: 5"))

    later, changes = read_again(loaded)

    assert {"tokenizer-workers": "8 → 9", "hf-token": "changed"} == changes.needs_restart
    assert later.settings.policy.scored is not None
    assert [2, 2, 5] == [one.weight for one in later.settings.policy.scored.scorers]


def test_impossible_value_of_indexer_config(tmp_path: Path) -> None:
    """The message names the file, the key and what it may be."""
    (tmp_path / "h.yaml").write_text(HEIMDALL.replace("workersCount: 8", "workersCount: 0"))

    with pytest.raises(ConfigError, match=r"h\.yaml: tokenizersPoolConfig\.workersCount 0: must be a whole"):
        parse_options([f"--router-config={tmp_path / 'h.yaml'}"])


def test_wrong_router_config(tmp_path: Path) -> None:
    """The message names the file and the mistake in it."""
    file = tmp_path / "picker.yaml"
    file.write_text("kind: EndpointPickerConfig\nplugins: [{type: queue-scorerr}]\n")

    with pytest.raises(ConfigError, match=r"picker\.yaml: plugin type 'queue-scorerr'"):
        parse_options(["--router-config", str(file)])
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        parse_options(["--router-config", str(tmp_path / "absent.yaml")])


def test_every_mode_is_offered() -> None:
    """The frontend offers every mode of the library."""
    assert set(POLICIES) == {parse_options(["--router-mode", mode]).router_mode for mode in POLICIES}


def test_text_flags() -> None:
    """Ray Serve's names and defaults. A threshold may be infinite, as in its code."""
    assert TextIndexSettings() == parse_options([]).texts
    said = parse_options(["--imbalanced-threshold", "inf", "--do-eviction", "--eviction-target-chars", "9"])

    assert PrefixAffinity(float("inf"), 0.1) == new_policy("prefix-affinity", said.policy)
    assert (True, 9) == (said.texts.do_eviction, said.texts.eviction_target_chars)
    with pytest.raises(ConfigError, match="eviction_target_chars"):
        parse_options(["--eviction-target-chars", "400001"])


def test_rule_flags() -> None:
    """By default nothing is filtered. Each flag reaches its filter."""
    assert RuleOptions() == parse_options([]).rules
    flags = (
        "--session-affinity hard --session-header X-Chat --session-ttl-s 5 --circuit-breaker "
        "--circuit-breaker-failures 2 --circuit-breaker-open-s 9 "
        "--active-decode-blocks-threshold 0.8 --active-prefill-tokens-threshold 100 --max-ongoing-requests 4 "
        "--lora-multiplex --locality-node n1 --locality-zone z1 --decisions 7 --log-decisions"
    )

    options = parse_options(flags.split())

    filters = FilterSettings(0.8, 100, 4, "hard", True, "n1", "z1")
    assert RuleOptions(filters, "x-chat", 5.0, True, BreakerSettings(2, 3, 9.0), 7, True) == options.rules
    assert options.replica.pool.lora_multiplex


@pytest.mark.parametrize(
    "flags",
    [
        ["--sticky-hit-rate", "1.1"],
        ["--stage-one", "header:"],
        ["--stage-one", "header:a b"],
        ["--stage-one", "hashes"],
        ["--active-decode-blocks-threshold", "1.5"],
        ["--decisions", "100001"],
        ["--session-header", "x y"],
        ["--max-ongoing-requests", "-1"],
    ],
)
def test_wrong_flags(flags: list[str]) -> None:
    """The message names the flag."""
    with pytest.raises(ConfigError, match=flags[0]):
        parse_options(flags)

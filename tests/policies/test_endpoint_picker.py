"""EndpointPickerConfig: read as published; an error names what is unknown."""

from __future__ import annotations

from typing import Any

import pytest

from kvrouter.errors import ConfigError
from kvrouter.policies import scorers
from kvrouter.policies.endpoint_picker import load_endpoint_picker, read_endpoint_picker
from tests.policies.tables import REQUEST, candidate, columns, moment, picked, seeded

HEIMDALL = """
global:
  imagePullSecrets:
    - name: moreh-registry

config:
  apiVersion: inference.networking.x-k8s.io/v1alpha1
  kind: EndpointPickerConfig
  plugins:
    - type: single-profile-handler
    - type: queue-scorer
    - type: kv-cache-utilization-scorer
    - type: max-score-picker
    - type: precise-prefix-cache-scorer
      parameters:
        indexerConfig:
          prefixStoreConfig:
            cacheSize: 500000
            blockSize: 256
          tokenProcessorConfig:
            blockSize: 32
            hashSeed: '12345'
          kvBlockIndexConfig:
            inMemoryConfig:
              size: 100000000
              podCacheSize: 10
            enableMetrics: true
          tokenizersPoolConfig:
            workersCount: 8
            minPrefixOverlapRatio: 0.8
            huggingFaceToken: hf_secret
            tokenizersCacheDir: '/tmp'
        kvEventsConfig:
          zmqEndpoint: 'tcp://*:5557'
          topicFilter: 'kv@'
          concurrency: 16
  schedulingProfiles:
    - name: default
      plugins:
        - pluginRef: queue-scorer
          weight: 2
        - pluginRef: kv-cache-utilization-scorer
          weight: 2
        - pluginRef: precise-prefix-cache-scorer
          weight: 3
        - pluginRef: max-score-picker
gateway:
  name: mif
"""
"""The published heimdall-values.yaml (docs.moreh.io, prefix cache-aware routing), shortened at its end."""


def config(*plugins: dict[str, Any], profile: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A config with these plugins; without a profile all of them are used."""
    profiles = [] if profile is None else [{"name": "default", "plugins": profile}]
    return {"kind": "EndpointPickerConfig", "plugins": list(plugins), "schedulingProfiles": profiles}


def prefix_cache(name: str = "", **store: int) -> dict[str, Any]:
    """The plugin of the prefix cache with a prefixStoreConfig."""
    parameters = {"indexerConfig": {"prefixStoreConfig": store}}
    return {"type": "precise-prefix-cache-scorer", "name": name or None, "parameters": parameters}


def test_published_example() -> None:
    """The published document, with Helm values around it: weights 2, 2, 3, one endpoint."""
    picker = load_endpoint_picker(HEIMDALL)

    assert [
        ("queue-scorer", scorers.queue, 2),
        ("kv-cache-utilization-scorer", scorers.kv_cache_utilization, 2),
        ("precise-prefix-cache-scorer", scorers.precise_prefix_cache, 3),
    ] == list(picker.policy.scorers)
    assert 1 == picker.policy.max_endpoints
    assert {
        "prefix-store-blocks": "500000",
        "kv-cache-block-size": "32",
        "index-max-blocks": "100000000",
        "index-max-holders": "10",
        "index-metrics": "True",
        "tokenizer-workers": "8",
        "min-prefix-overlap-ratio": "0.8",
        "hf-token": "hf_secret",
        "tokenizer-cache-dir": "/tmp",
    } == {one.name: one.text for one in picker.implied}


def test_hash_seed_is_accepted_with_a_note() -> None:
    """So are the settings of Heimdall's event listener."""
    notes = load_endpoint_picker(HEIMDALL).notes

    assert any("hashSeed has no effect" in note for note in notes)
    assert any("kvEventsConfig has no effect" in note for note in notes)


def test_only_given_keys_are_defaults() -> None:
    """Without indexerConfig nothing; a prefix store is measured in characters: pieces here have 256."""
    assert () == load_endpoint_picker("{kind: EndpointPickerConfig, plugins: [{type: queue-scorer}]}").implied
    assert [("prefix-store-blocks", "250000")] == [
        (one.name, one.text) for one in read_endpoint_picker(config(prefix_cache(blockSize=128))).implied
    ]


def test_two_indexers_that_differ() -> None:
    """The error names both plugins."""
    plugins = [prefix_cache("one", cacheSize=1), prefix_cache("two", cacheSize=2)]

    with pytest.raises(ConfigError, match="'one' and 'two' differ in prefixStoreConfig"):
        read_endpoint_picker(config(*plugins))


@pytest.mark.parametrize("profile", [None, [], [{"pluginRef": "queue-scorer", "weight": 0}]])
def test_nothing_that_scores(profile: list[dict[str, Any]] | None) -> None:
    """Without scorers, or with weights of 0, all workers are equal, and a note states it."""
    document = config({"type": "queue-scorer"}, profile=profile)
    if profile is None:
        document["plugins"] = []
    elif not profile:
        document["schedulingProfiles"] = [{"name": "default", "plugins": [{"pluginRef": "p"}]}]
        document["plugins"] = [{"type": "max-score-picker", "name": "p"}]

    picker = read_endpoint_picker(document)

    chance, workers = seeded(1), [candidate("a", waiting=5), candidate("b")]
    assert {0, 1} == {picker.policy.pick(REQUEST, columns(workers), chance) for _ in range(30)}
    assert any("chance decides" in note for note in picker.notes)


def test_two_pickers() -> None:
    """Two pickers are an error: only one can apply."""
    refs = [{"pluginRef": "queue-scorer"}, {"pluginRef": "one"}, {"pluginRef": "two"}]
    pickers = [{"type": "max-score-picker", "name": name} for name in ("one", "two")]

    with pytest.raises(ConfigError, match="the pickers one, two: keep one"):
        read_endpoint_picker(config({"type": "queue-scorer"}, *pickers, profile=refs))


def test_secret_stays_secret() -> None:
    """No repr has the Hugging Face token, and no message quotes a line of a broken file."""
    assert "hf_secret" not in repr(load_endpoint_picker(HEIMDALL))
    for broken in ('"hf_secret', "*hf_secret", "!hf_secret x", "[hf_secret"):
        with pytest.raises(ConfigError, match=r"not YAML \(line \d+, column \d+\)") as raised:
            load_endpoint_picker(HEIMDALL.replace("hf_secret", broken))
        assert "hf_secret" not in str(raised.value)


def test_weight_is_one_if_omitted() -> None:
    """Without a profile every plugin has weight 1, too."""
    plugin = {"type": "queue-scorer"}

    for document in (config(plugin, profile=[{"pluginRef": "queue-scorer"}]), config(plugin)):
        assert [("queue-scorer", scorers.queue, 1.0)] == list(read_endpoint_picker(document).policy.scorers)


def test_named_plugins_of_one_type() -> None:
    """A plugin may have a name, and a type may be used twice."""
    document = config(
        {"type": "load-aware-scorer", "name": "strict", "parameters": {"threshold": 10}},
        {"type": "load-aware-scorer", "name": "lax"},
        {"type": "max-score-picker", "parameters": {"maxNumOfEndpoints": 2}},
        profile=[
            {"pluginRef": "strict", "weight": 0.5},
            {"pluginRef": "lax"},
            {"pluginRef": "max-score-picker"},
        ],
    )

    policy = read_endpoint_picker(document).policy

    [row] = policy.terms(REQUEST, columns([candidate("w1", waiting=5)]), moment())
    assert (
        pytest.approx({"strict": 0.25, "lax": 0.5 * (1 - 5 / 128), "total": 0.125 + 0.5 * (1 - 5 / 128)})
        == row
    )
    assert 2 == policy.max_endpoints


@pytest.mark.parametrize(
    "type_",
    [
        "queue-scorer", "kv-cache-utilization-scorer", "precise-prefix-cache-scorer", "load-aware-scorer",
        "active-request-scorer", "lora-affinity-scorer", "session-affinity-scorer", "no-hit-lru-scorer",
    ],
)  # fmt: skip
def test_every_scorer_by_its_published_name(type_: str) -> None:
    """Each scorer can be used alone."""
    policy = read_endpoint_picker(config({"type": type_})).policy

    assert ["w1"] == picked(policy, [candidate("w1")])


@pytest.mark.parametrize(
    ("document", "named"),
    [
        (config({"type": "quue-scorer"}), "'quue-scorer' is unknown; use one of queue-scorer"),
        (config({"type": "queue-scorer", "parametres": {}}), "parametres"),
        (
            config({"type": "queue-scorer", "parameters": {"foo": 1}}),
            "plugin 'queue-scorer', parameters.*foo",
        ),
        (
            config(
                {"type": "precise-prefix-cache-scorer", "parameters": {"indexerConfig": {"cacheSize": 1}}}
            ),
            "cacheSize.*indexerConfig",
        ),
        (config({"type": "load-aware-scorer", "parameters": {"threshold": "many"}}), "threshold"),
        (config({"type": "load-aware-scorer", "parameters": {"threshold": 0}}), "threshold is 0"),
        (
            config({"type": "max-score-picker", "parameters": {"maxNumOfEndpoints": 0}}),
            "maxNumOfEndpoints is 0",
        ),
        (config(profile=[{"pluginRef": "unknown"}]), "'unknown' is not a plugin; plugins: none"),
        (config({"type": "queue-scorer"}, profile=[{"pluginRef": "queue-scorer", "weight": -1}]), "-1"),
        (config({"type": "queue-scorer"}, profile=[{"pluginRef": "queue-scorer", "wieght": 1}]), "wieght"),
        (config({"type": "queue-scorer"}, {"type": "queue-scorer"}), "same name"),
        ({"kind": "Deployment"}, "Deployment"),
        ({"kind": "EndpointPickerConfig", "featureGates": []}, "featureGates"),
        ({}, "kind"),
    ],
)
def test_unknown_is_named(document: dict[str, Any], named: str) -> None:
    """The error names an unknown type, an unknown key or an impossible value."""
    with pytest.raises(ConfigError, match=named):
        read_endpoint_picker(document)


def test_one_profile_only() -> None:
    """Several profiles, which separate prefill from decode, are not supported."""
    document = config({"type": "queue-scorer"})
    document["schedulingProfiles"] = [{"name": "prefill"}, {"name": "decode"}]

    with pytest.raises(ConfigError, match="prefill, decode: only one"):
        read_endpoint_picker(document)


@pytest.mark.parametrize("text", ["", "a: [", "- 1", "just words", "a: 2024-13-45", "[" * 3000])
def test_unreadable_config(text: str) -> None:
    """A text that is not YAML, or not a mapping, is rejected."""
    with pytest.raises(ConfigError, match="router config"):
        load_endpoint_picker(text)


def test_unused_parameters_are_noted() -> None:
    """Timeouts and sizes that bookings make unnecessary get a note."""
    picker = read_endpoint_picker(
        config(
            {"type": "active-request-scorer", "parameters": {"requestTimeout": "2m"}},
            {"type": "no-hit-lru-scorer", "parameters": {"lruSize": 1024}},
        )
    )

    assert ["requestTimeout", "lruSize"] == [note.split()[1] for note in picker.notes]

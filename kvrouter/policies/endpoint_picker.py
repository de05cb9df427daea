"""Reads an EndpointPickerConfig, the file that configures llm-d's and Heimdall's scheduler.

    plugins            the plugins: type, an optional name, parameters
    schedulingProfiles the plugins that are used, by pluginRef, and their weights (1 if omitted)

The file is read as published, also inside Heimdall's Helm values (`config:`). An unknown type or key is an
error that names it. `indexerConfig` gives defaults for settings of kvrouter (`implied`). Other known settings
have no effect because kvrouter has other means: `notes` lists them.

No message quotes the file: it may have a token of the model hub.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from kvrouter.errors import ConfigError
from kvrouter.policies import scorers
from kvrouter.policies.scored import Scored, Weighted
from kvrouter.settings.declare import Implied

KIND = "EndpointPickerConfig"
DEFAULT_MAX_ENDPOINTS = 1
# Heimdall's own, for a prefixStoreConfig that gives one of the two.
_CACHE_SIZE = 500_000
_PART_CHARACTERS = 256


# An unknown key is an error: a weight with a typo would otherwise silently be the default.
class _Strict(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class PrefixStoreParameters(_Strict, frozen=True):
    """`cacheSize` blocks of `blockSize` characters."""

    cache_size: int | None = None
    block_size: int | None = None


class TokenProcessor(_Strict, frozen=True):
    """`blockSize` in tokens, as the engines have it; `hashSeed` is accepted and has no effect."""

    block_size: int | None = None
    hash_seed: str | int | None = None


class InMemory(_Strict, frozen=True):
    """The index's bounds: number of hashes, and of holders of each."""

    size: int | None = None
    pod_cache_size: int | None = None


class KvBlockIndex(_Strict, frozen=True):
    """The block index."""

    in_memory_config: InMemory = InMemory()
    enable_metrics: bool | None = None


class TokenizersPool(_Strict, frozen=True):
    """Tokenizing. The repr omits the Hugging Face token, so that it cannot appear in a log."""

    workers_count: int | None = None
    min_prefix_overlap_ratio: float | None = None
    hugging_face_token: str | None = None
    tokenizers_cache_dir: str | None = None

    def __repr__(self) -> str:
        return f"TokenizersPool(workers_count={self.workers_count})"


class Indexer(_Strict, frozen=True):
    """`indexerConfig`."""

    prefix_store_config: PrefixStoreParameters = PrefixStoreParameters()
    token_processor_config: TokenProcessor = TokenProcessor()
    kv_block_index_config: KvBlockIndex = KvBlockIndex()
    tokenizers_pool_config: TokenizersPool = TokenizersPool()

    def implied(self) -> list[Implied]:
        """The settings of kvrouter that do the same, for the keys that are given."""
        store, index = self.prefix_store_config, self.kv_block_index_config
        bounds, pool = index.in_memory_config, self.tokenizers_pool_config
        capacity = None
        if store.cache_size is not None or store.block_size is not None:
            size = _CACHE_SIZE if store.cache_size is None else store.cache_size
            characters = _PART_CHARACTERS if store.block_size is None else store.block_size
            capacity = size * characters // _PART_CHARACTERS  # as 256 characters each
        memory, tokens = "kvBlockIndexConfig.inMemoryConfig", "tokenizersPoolConfig"
        rows: list[tuple[str, Any, str]] = [
            ("prefix-store-blocks", capacity, "prefixStoreConfig"),
            ("kv-cache-block-size", self.token_processor_config.block_size, "tokenProcessorConfig.blockSize"),
            ("index-max-blocks", bounds.size, f"{memory}.size"),
            ("index-max-holders", bounds.pod_cache_size, f"{memory}.podCacheSize"),
            ("index-metrics", index.enable_metrics, "kvBlockIndexConfig.enableMetrics"),
            ("tokenizer-workers", pool.workers_count, f"{tokens}.workersCount"),
            ("min-prefix-overlap-ratio", pool.min_prefix_overlap_ratio, f"{tokens}.minPrefixOverlapRatio"),
            ("hf-token", pool.hugging_face_token, f"{tokens}.huggingFaceToken"),
            ("tokenizer-cache-dir", pool.tokenizers_cache_dir, f"{tokens}.tokenizersCacheDir"),
        ]
        return [
            # the engines have one block size: blocks of another one are never found
            Implied(name, str(value), where, is_fact=name == "kv-cache-block-size")
            for name, value, where in rows
            if value is not None
        ]


class KvEvents(_Strict, frozen=True):
    """`kvEventsConfig`: how Heimdall receives the engines' events."""

    zmq_endpoint: str | None = None
    topic_filter: str | None = None
    concurrency: int | None = None


class PrefixCacheParameters(_Strict, frozen=True):
    """The parameters of precise-prefix-cache-scorer."""

    indexer_config: Indexer = Indexer()
    kv_events_config: KvEvents = KvEvents()


class _NoParameters(_Strict, frozen=True):
    pass


class _LoadAware(_Strict, frozen=True):
    threshold: int = scorers.QUEUE_THRESHOLD


class _ActiveRequest(_Strict, frozen=True):
    request_timeout: str | None = None


class _NoHitLru(_Strict, frozen=True):
    prefix_plugin_name: str | None = None
    prefill_profile: str | None = None
    lru_size: int | None = None


class _MaxScore(_Strict, frozen=True):
    max_num_of_endpoints: int = DEFAULT_MAX_ENDPOINTS


class _Plugin(_Strict, frozen=True):
    type: str
    name: str | None = None
    parameters: dict[str, Any] | None = None


class _Reference(_Strict, frozen=True):
    plugin_ref: str
    weight: float = 1.0


class _Profile(_Strict, frozen=True):
    name: str
    plugins: list[_Reference] = field(default_factory=list)


class _Document(_Strict, frozen=True):
    kind: str
    api_version: str = ""
    plugins: list[_Plugin] = field(default_factory=list)
    scheduling_profiles: list[_Profile] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EndpointPicker:
    """What a file configures: the policy, defaults of settings, and notes about keys without effect."""

    policy: Scored
    implied: tuple[Implied, ...] = ()
    notes: tuple[str, ...] = ()


_Parameters = TypeVar("_Parameters", bound=_Strict)
_Made = Callable[[Any], scorers.Scorer]

_SCORERS: dict[str, tuple[type[_Strict], _Made]] = {
    "queue-scorer": (_NoParameters, lambda _: scorers.queue),
    "kv-cache-utilization-scorer": (_NoParameters, lambda _: scorers.kv_cache_utilization),
    "precise-prefix-cache-scorer": (PrefixCacheParameters, lambda _: scorers.precise_prefix_cache),
    "load-aware-scorer": (_LoadAware, lambda wanted: scorers.load_aware(wanted.threshold)),
    "active-request-scorer": (_ActiveRequest, lambda _: scorers.active_request),
    "lora-affinity-scorer": (_NoParameters, lambda _: scorers.lora_affinity),
    "session-affinity-scorer": (_NoParameters, lambda _: scorers.session_affinity),
    "no-hit-lru-scorer": (_NoHitLru, lambda _: scorers.no_hit_lru),
}
_PICKER = "max-score-picker"
_HANDLER = "single-profile-handler"


def load_endpoint_picker(text: str) -> EndpointPicker:
    """Read a file's text. Raises ConfigError."""
    import yaml

    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ConfigError(f"the router config is not YAML{place}") from None  # the cause quotes the file
    if not isinstance(document, dict):
        raise ConfigError(f"the router config is not an {KIND}: it has to be a mapping with kind: {KIND}")
    return read_endpoint_picker(document)


def read_endpoint_picker(document: Mapping[str, Any]) -> EndpointPicker:
    """Read a parsed file. Raises ConfigError."""
    if "kind" not in document and isinstance(document.get("config"), dict):
        document = document["config"]  # Helm values: the other keys describe the deployment
    wanted = _convert(dict(document), _Document, "")
    if wanted.kind != KIND:
        raise ConfigError(f"kind {wanted.kind!r}: the router config has to be an {KIND}")
    plugins = {plugin.name or plugin.type: plugin for plugin in wanted.plugins}
    if len(plugins) < len(wanted.plugins):
        raise ConfigError("two plugins have the same name: name each with name:")
    parameters = {name: _parameters(name, plugin) for name, plugin in plugins.items()}
    weighted: list[Weighted] = []
    max_endpoints = DEFAULT_MAX_ENDPOINTS
    for reference in _references(wanted, plugins):
        plugin, given = plugins[reference.plugin_ref], parameters[reference.plugin_ref]
        if isinstance(given, _MaxScore):
            max_endpoints = given.max_num_of_endpoints
        elif plugin.type in _SCORERS:
            scorer = _SCORERS[plugin.type][1](given)
            weighted.append(Weighted(reference.plugin_ref, scorer, reference.weight))
    notes = [note for name, given in parameters.items() for note in _notes(name, given)]
    if not any(one.weight for one in weighted):
        notes.append("no scorer has a weight above 0: all workers are equal, and chance decides")
    return EndpointPicker(Scored(tuple(weighted), max_endpoints), _implied(parameters), tuple(notes))


def _references(wanted: _Document, plugins: Mapping[str, _Plugin]) -> list[_Reference]:
    """The references of the one profile; without a profile every plugin, with weight 1."""
    profiles = wanted.scheduling_profiles
    if len(profiles) > 1:
        names = ", ".join(profile.name for profile in profiles)
        raise ConfigError(f"schedulingProfiles {names}: only one is supported")
    if not profiles:
        return [_Reference(name) for name in plugins]
    pickers = [one for one in profiles[0].plugins if one.plugin_ref in plugins and _is_picker(plugins, one)]
    if len(pickers) > 1:
        names = ", ".join(one.plugin_ref for one in pickers)
        raise ConfigError(f"schedulingProfiles refers to the pickers {names}: keep one")
    for reference in profiles[0].plugins:
        if reference.plugin_ref not in plugins:
            known = ", ".join(plugins) or "none"
            raise ConfigError(f"pluginRef {reference.plugin_ref!r} is not a plugin; plugins: {known}")
        if not (math.isfinite(reference.weight) and reference.weight >= 0):
            raise ConfigError(
                f"the weight of pluginRef {reference.plugin_ref!r} is {reference.weight}; use at least 0"
            )
    return profiles[0].plugins


def _implied(parameters: Mapping[str, _Strict]) -> tuple[Implied, ...]:
    """The defaults of all plugins. Raises ConfigError if two plugins differ."""
    found: dict[str, tuple[str, Implied]] = {}
    for name, given in parameters.items():
        for implied in given.indexer_config.implied() if isinstance(given, PrefixCacheParameters) else ():
            first, other = found.setdefault(implied.name, (name, implied))
            if other.text != implied.text:
                raise ConfigError(f"plugins {first!r} and {name!r} differ in {implied.where}: keep one value")
    return tuple(implied for _, implied in found.values())


def _is_picker(plugins: Mapping[str, _Plugin], reference: _Reference) -> bool:
    return plugins[reference.plugin_ref].type == _PICKER


def _parameters(name: str, plugin: _Plugin) -> _Strict:
    given = plugin.parameters or {}
    if plugin.type == _PICKER:
        picker = _convert(given, _MaxScore, name)
        if picker.max_num_of_endpoints < 1:
            raise ConfigError(
                f"plugin {name!r}: maxNumOfEndpoints is {picker.max_num_of_endpoints}; use at least 1"
            )
        return picker
    if plugin.type == _HANDLER:
        return _convert(given, _NoParameters, name)
    if plugin.type not in _SCORERS:
        known = ", ".join([*_SCORERS, _PICKER, _HANDLER])
        raise ConfigError(f"plugin type {plugin.type!r} is unknown; use one of {known}")
    parameters = _convert(given, _SCORERS[plugin.type][0], name)
    if isinstance(parameters, _LoadAware) and parameters.threshold < 1:
        raise ConfigError(f"plugin {name!r}: threshold is {parameters.threshold}; use at least 1")
    return parameters


def _convert(given: dict[str, Any], type_: type[_Parameters], plugin: str) -> _Parameters:
    try:
        return msgspec.convert(given, type_)
    except msgspec.ValidationError as error:
        where = f"plugin {plugin!r}, parameters" if plugin else KIND
        raise ConfigError(f"{where}: {error}") from error


def _notes(name: str, given: _Strict) -> list[str]:
    match given:
        case PrefixCacheParameters():
            return [f"{name}: {note}" for note in _prefix_cache_notes(given)]
        case _ActiveRequest(request_timeout=timeout) if timeout is not None:
            return [f"{name}: requestTimeout has no effect: a request counts for as long as it runs"]
        case _NoHitLru(lru_size=size) if size is not None:
            return [f"{name}: lruSize has no effect: a worker is removed when it leaves"]
    return []


def _prefix_cache_notes(given: PrefixCacheParameters) -> list[str]:
    indexer, events = given.indexer_config, given.kv_events_config
    notes = []
    if indexer.token_processor_config.hash_seed is not None:
        notes.append(
            "hashSeed has no effect: blocks are named by a hash of their tokens, not by the engines' hashes"
        )
    if events.zmq_endpoint is not None or events.topic_filter is not None or events.concurrency is not None:
        notes.append("kvEventsConfig has no effect: the agent of each engine reads its events (--kv-events)")
    return notes

"""Which part of a request an engine computes, and the KV connector with which it hands over its blocks.

--role, --kv-connector ───────────────┐
kv_role, kv_connector of the engine ──┼──settled──> Half, or EngineError
vllm:nixl_…, vllm:mooncake_xfer_… ────┘ in its metrics
disaggregation_mode of SGLang ──settled_sglang──> Half, or EngineError
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.core.wire.heartbeats import BOTH, CONNECTORS, DECODE, PEER, PREFILL
from kvrouter.errors import ConfigError
from kvrouter.worker.engines.http import EngineError, half_of_a_pair
from kvrouter.worker.options import AgentOptions, read_connector

# vLLM's class of each connector, as `kv_connector` of its configuration names it: 0.33's, and a former name.
_CLASSES = {
    "NixlConnector": "nixl", "NixlPullConnector": "nixl", "NixlPushConnector": "nixl-push",
    "MooncakeConnector": "mooncake", "LMCacheConnectorV1": "lmcache", "LMCacheMPConnector": "lmcache",
    "MoRIIOConnector": "moriio",
    "ExampleConnector": "example", "SharedStorageConnector": "example",
}  # fmt: skip
_SGLANG = "sglang"
_ROLES = {"kv_producer": PREFILL, "kv_consumer": DECODE, "kv_both": BOTH}
ROLE_UNKNOWN = (
    "the role of its KV connector ({shown_by}) is unknown, and it is taken to compute whole requests: give "
    "--role both, prefill or decode (kvrouter serve: role=both)"
)


@dataclass(frozen=True, slots=True)
class Half:
    """The role of an engine and its connector, as the card has them. `lack`: what is unclear."""

    role: str = BOTH
    connector: str = ""
    lack: str = ""

    @property
    def needs_bootstrap(self) -> bool:
        """Whether the decode engine asks its bootstrap server where the blocks are."""
        return (self.role, self.connector) == (PREFILL, "mooncake")


def settled(kv_role: str, kv_connector: str, options: AgentOptions) -> Half:
    """The half that flags and a vLLM engine name together; flags go first. Raises EngineError.

    `kv_role`, `kv_connector`: as in vLLM's configuration; empty: the engine does not tell.
    """
    told = _ROLES.get(kv_role)
    if options.kv_connector == PEER:
        if told in {PREFILL, DECODE}:
            raise EngineError(
                half_of_a_pair(f"kv_role {kv_role} in /server_info", f"remove --kv-connector {PEER}")
            )
        return Half(BOTH, PEER)
    role = options.role or (BOTH if options.whole else told)
    if told in {PREFILL, DECODE} and role != told:
        flag = f"--role {options.role}" if options.role else "--whole"
        shown_by = f"kv_role {kv_role} in /server_info"
        raise EngineError(half_of_a_pair(shown_by, f"remove {flag}, or start it without that"))
    connector = options.kv_connector or _CLASSES.get(kv_connector, "")
    if role is None and options.kv_connector:
        raise EngineError(f"--kv-connector {connector} without a role: give --role prefill or decode")
    if role is None:
        return Half(lack=ROLE_UNKNOWN.format(shown_by=kv_connector) if kv_connector else "")
    if role != BOTH:
        _check_served(role, connector or kv_connector)
    return Half(role, connector)


def settled_sglang(mode: str, options: AgentOptions) -> Half:
    """The half that SGLang's `disaggregation_mode` names; flags must agree. Raises EngineError.

    `mode` empty: it does not tell, so the flags do.
    """
    role = mode if mode in {PREFILL, DECODE} else BOTH
    asked = options.role or (BOTH if options.whole else None)
    if mode and asked not in {None, role}:
        flag = f"--role {options.role}" if options.role else "--whole"
        shown_by = f"--disaggregation-mode {mode}"
        raise EngineError(f"the engine has {shown_by}: remove {flag}, or start it with another mode")
    role = role if mode else asked or BOTH
    if options.kv_connector not in {"", _SGLANG}:
        raise EngineError(f"--kv-connector {options.kv_connector}: SGLang's engines have only {_SGLANG}")
    return Half(role, "" if role == BOTH else _SGLANG)


def _check_served(role: str, connector: str) -> None:
    if not connector:
        known = " or ".join(CONNECTORS)
        raise EngineError(f"role {role} without a connector: give --kv-connector {known}")
    try:
        read_connector(connector)
    except ConfigError as error:
        raise EngineError(half_of_a_pair(f"role {role}", str(error))) from None

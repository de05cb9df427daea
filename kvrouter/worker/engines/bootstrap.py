"""The bootstrap server of a Mooncake prefill engine, which names the engine for its decode engines.

Another start of the engine has other ids. The agent learns it again then, as all that it knows of it.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from kvrouter.connectors.source import address_of
from kvrouter.core.wire.ops import UNREADABLE
from kvrouter.core.wire.values import Text
from kvrouter.worker.engines.http import EngineError, EngineHttp, EngineStatusError
from kvrouter.worker.options import AgentOptions

# VLLM_MOONCAKE_BOOTSTRAP_PORT of vLLM 0.33.
PORT = 8998


class _Entry(Struct, frozen=True):
    engine_id: Text


_decode = msgspec.json.Decoder(dict[int, _Entry]).decode


async def learn_engine_ids(options: AgentOptions) -> tuple[str, ...]:
    """The ids of the engine's ranks, in their order. Raises EngineError."""
    address = options.kv_address or address_of(options.engine_url, options.bootstrap_port or PORT)
    try:
        async with EngineHttp.open(f"http://{address}") as server:
            body = await server.find("query")
            if body is None:
                raise EngineStatusError("query", 404)
            found = _decode(body)
    except (EngineError, *UNREADABLE) as error:
        raise EngineError(
            f"no Mooncake bootstrap server of this prefill engine at http://{address}, {error}: give "
            "--bootstrap-port (VLLM_MOONCAKE_BOOTSTRAP_PORT of the engine) or --kv-address HOST:PORT"
        ) from None
    if sorted(found) != list(range(len(found))) or not found:
        raise EngineError(f"http://{address}/query names the ranks {sorted(found)[:9]}, not all from 0 on")
    return tuple(found[rank].engine_id for rank in range(len(found)))

"""The engines' HTTP routes: which of them clients reach through the router, and in which API's form.

    BY_PATH  served: the prompt becomes tokens, and the blocks that a worker has decide (bodies/apis.py)
    PASSED   passed on: one request of one client, with one answer, goes to a worker of its model by load
    CLOSED   all others, each with its reason: 404

A route is passed on if it needs no worker in particular, names its model or can go to the only one, and
neither changes an engine nor shows what other clients do. tests/frontend/test_engine_routes.py compares the
three with the routes of vLLM and SGLang, which `python -m scripts.kit.engine_routes` records.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from kvrouter.bodies.apis import (
    BY_PATH,
    COHERE,
    COHERE_CHAT,
    COHERE_OR_OPENAI,
    MESSAGES_PASSED_ON,
    OLLAMA,
    PASSED_ON,
    STREAM_PASSED_ON,
    Api,
)
from kvrouter.errors import KvRouterError
from kvrouter.relay.answer import Answer

Route = tuple[str, str]
"""Method and path."""

_POST = {
    PASSED_ON: (
        "/v1/embeddings",
        "/v1/chat/completions/batch",
        "/generative_scoring",
        "/v1/score",
        "/score",
        "/v1/decisions",
        "/v1/systemone",
        "/rerank",
        "/pooling",
        "/encode",
        "/classify",
        "/v1/classify",
        "/v1/audio/speech",
        "/tokenize",
        "/v1/tokenize",
        "/detokenize",
        "/v1/detokenize",
        "/vertex_generate",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions/render",
        "/v1/completions/derender",
        "/v1/responses/render",
        "/parse_function_call",
        "/separate_reasoning",
    ),
    STREAM_PASSED_ON: (
        "/generate",
        "/inference/v1/generate",
        "/invocations",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/images/generations",
        "/v1/images/edits",
    ),
    MESSAGES_PASSED_ON: ("/v1/messages/count_tokens", "/v1/messages/render"),
    COHERE_CHAT: ("/cohere/v2/chat",),
    COHERE: ("/cohere/v2/chat/render",),
    COHERE_OR_OPENAI: ("/v2/embed", "/v1/rerank", "/v2/rerank"),
    OLLAMA: ("/api/chat", "/api/generate", "/api/show"),
}
# SGLang takes both methods, and a client may use either.
_PUT = ("/generate", "/encode", "/classify", "/v1/rerank")
_GET = {
    PASSED_ON: ("/version", "/tokenizer_info", "/model_info", "/get_model_info"),
    OLLAMA: ("/api/tags",),
}
# Engines take the body of these as a form with a file.
FORMS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits"})
# With --tenant-cache-salt: engines make a chat of these bodies, and take no salt with it.
UNSALTED = frozenset({"/vertex_generate", "/cohere/v2/chat", "/api/chat", "/api/generate"})
# SGLang's own: it keeps blocks apart by `extra_key`.
EXTRA_KEYED = frozenset({"/generate", "/encode"})
_POSTED = {path: api for api, paths in _POST.items() for path in paths}
PASSED: Mapping[Route, Api] = MappingProxyType(
    {("POST", path): api for path, api in _POSTED.items()}
    | {("PUT", path): _POSTED[path] for path in _PUT}
    | {("GET", path): api for api, paths in _GET.items() for path in paths}
)

_CLOSED = {
    "the router has its own": "/health /metrics /ready /v1/models /v1/models/{} /openapi.json",
    "the router has its own at /v1/models": "/models",
    "says of one engine that it runs; use /live, /ready or /health": (
        "/ /ping /health_generate /liveness /is_sleeping /is_paused"
    ),
    "shows the state of one engine": (
        "/load /v1/loads /stats /server_info /get_server_info /kv_event_sources /get_world_size /weight_info "
        "/v1/model_info /fault_tolerance/status /is_scaling_elastic_ep /get_hicache_l3_cache_layout "
        "/list_external_corpora /v1/list_loras /v1/actions/metadata "
        "/get_remote_instance_transfer_engine_info /remote_instance_transfer_engine_info"
    ),
    "changes the engine: its operator's business, at the engine itself": (
        "/reset_prefix_cache /reset_mm_cache /reset_encoder_cache /flush_cache /sleep /wake_up "
        "/release_kv_cache_memory /release_memory_occupation /resume_memory_occupation /pause /resume "
        "/pause_generation /continue_generation /collective_rpc /set_internal_state /configure_logging "
        "/freeze_gc /slow_down /pd_role_switch /scale_elastic_ep /fault_tolerance/apply "
        "/v1/load_lora_adapter /v1/unload_lora_adapter /load_lora_adapter /load_lora_adapter_from_tensors "
        "/unload_lora_adapter /v1/set_lora /v1/merge_lora_weights /v1/unmerge_lora_weights "
        "/add_external_corpus /remove_external_corpus /hicache/storage-backend /hicache/storage-backend/clear"
    ),
    "replaces the weights of the engine, for training": (
        "/init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update "
        "/start_draft_weight_update /update_weights /finish_weight_update /update_weight_version "
        "/weight_checker /weights_checker /get_weights_checksum /get_weights_by_name "
        "/update_weights_from_disk /update_weights_from_tensor /update_weights_from_tensor_checker "
        "/update_weights_from_distributed /update_weights_from_ipc /begin_weight_update /end_weight_update "
        "/init_weights_update_group /destroy_weights_update_group "
        "/init_weights_send_group_for_remote_instance /send_weights_to_remote_instance /rollout/generate"
    ),
    "measures or debugs the engine": (
        "/start_profile /stop_profile /set_trace_level /dumper/{} /start_expert_distribution_record "
        "/stop_expert_distribution_record /dump_expert_distribution_record"
    ),
    "ends requests of any client; end your own by closing its connection": (
        "/abort_request /abort_requests /inference/v1/abort_requests"
    ),
    "only one engine has it, and its id is no proof of who asks": (
        "/v1/responses/{} /v1/responses/{}/cancel /open_session /close_session /v1/images/{}/content "
        "/v1/videos /v1/videos/{} /v1/videos/{}/content /v1/meshes /v1/meshes/{} /v1/meshes/{}/content "
        "/v1/actions/generations"
    ),
    "a WebSocket, which is not served": (
        "/v1/realtime /v1/realtime_video/generate /v1/actions/realtime /openpi/policy"
    ),
    "pages about the engine, which differ with its version": ("/docs /docs/oauth2-redirect /redoc /static"),
}
CLOSED: Mapping[str, str] = MappingProxyType(
    {path: reason for reason, paths in _CLOSED.items() for path in paths.split()}
)
"""The reason by path, with `{}` for each parameter."""
_PARAMETERS = [
    (re.compile(re.escape(path).replace(r"\{\}", "[^/]+")), reason)
    for path, reason in CLOSED.items()
    if "{}" in path
]

# Paths that are no routes, but of an API: their 404 is for its clients.
_BELOW = {"/cohere": COHERE, "/v2": COHERE_OR_OPENAI}
_API_OF = {**_BELOW, **{path: api for (_, path), api in PASSED.items()}, **BY_PATH}
_SLASHES = re.compile("/+")
# Deeper paths have the API of their beginning; bounds the work for a hostile one.
_MOST_SEGMENTS = 6


def relayed() -> Iterator[tuple[str, str, Api]]:
    """Method, path and API of every route that a worker answers."""
    for path, api in BY_PATH.items():
        yield "POST", path, api
    for (method, path), api in PASSED.items():
        yield method, path, api


PATHS = frozenset(path for _, path, _ in relayed())


def api_of(path: str) -> Api:
    """The API that a client of this path speaks: that of its route, or of the nearest one above it."""
    segments = _SLASHES.sub("/", path).split("/", _MOST_SEGMENTS)[:_MOST_SEGMENTS]
    above = ("/".join(segments[:end]) for end in range(len(segments), 1, -1))
    return next((_API_OF[one] for one in above if one in _API_OF), PASSED_ON)


def why_closed(path: str) -> str:
    """The reason why a route of an engine is not one here; empty for any other path."""
    found = CLOSED.get(path)
    return found or next((reason for pattern, reason in _PARAMETERS if pattern.fullmatch(path)), "")


def error_answer(path: str, error: KvRouterError, request_id: str) -> Answer:
    """The answer to a request for this path, for its API's clients."""
    return api_of(path).error_answer(error, request_id)

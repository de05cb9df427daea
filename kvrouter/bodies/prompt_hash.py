"""The hash by which a prompt is known that ended workers: of all that an engine computes with.

    route, the fields in _COMPUTED by name, in one spelling ──BLAKE2b──> 16 bytes

The body is hashed, not token ids: so it needs no tokenizer, and two prompts are the same only if they are
equal to their ends. The options count too, since they can end an engine as well as the text can (a grammar,
a bias, a seed): a harmless request with a common text must not be refused because another one added such an
option. What no engine reads does not count, at the top of the body and in its messages, nor does the
spelling of the JSON in fields up to LARGE_BYTES (numbers apart: 1 and 1.0 differ). Clients change these when
they ask again (a trace id, a time), and whoever wants to end engines could. The names are those of vLLM 0.33
and SGLang 0.5.23; an option that is newer does not count.

Bodies that are no JSON object (forms) count byte for byte; a client that makes a new boundary for each try
is not recognized.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

import msgspec
from msgspec import Raw

from kvrouter.core.wire.ids import PoolId, PromptHash
from kvrouter.core.wire.values import PROMPT_HASH_BYTES

# Larger bodies are hashed in a thread, and larger values as they are spelled.
LARGE_BYTES = 256 * 1024

# The fields of requests on all routes. Left out: how the answer is sent, who asks, and where the request
# should go. A salt changes only what is cached.
_COMPUTED = frozenset(
    """
    add_generation_prompt add_special_tokens allowed_token_ids apply_softmax audio audio_data bad_words
    best_of bootstrap_host bootstrap_port bootstrap_room chat_template chat_template_kwargs content_parts
    context continue_final_message conversation_id custom_labels custom_logit_processor custom_params data
    data_1 data_2 data_parallel_rank decision_layout dimensions documents early_stopping ebnf
    ec_transfer_params echo embed_dtype embed_override_token_id embed_overrides embedding_types
    encoding_format endianness extra_key features format frequency_penalty guided_choice guided_decoding
    guided_decoding_backend guided_grammar guided_json guided_regex hotwords ignore_eos image_data images
    images_config include include_reasoning include_stop_str_in_output input input_embeds input_ids
    input_type inputs instruction instructions is_cross_encoder_request item_embed_overrides item_first items
    joint json_schema k kv_hints kv_transfer_params label_token_ids language late_chunking_params
    length_penalty logit_bias logprob_start_len logprob_token_ids logprobs lora_path max_completion_tokens
    max_dynamic_patch max_output_tokens max_thinking_tokens max_tokens max_tokens_per_doc
    max_tokens_per_query max_tool_calls media_io_kwargs messages min_dynamic_patch min_p min_tokens
    mm_content_hashes mm_hashes mm_payload mm_processor_kwargs modalities model multi_item_delimiter_indices
    n no_stop_trim normalize options output_config output_dimension output_mode p padding
    parallel_tool_calls positional_embed_overrides presence_penalty previous_input_messages
    previous_response_id prompt prompt_embeds prompt_logprobs prompt_token_ids prompt_tokens queries query
    query_embed_overrides questions raw reasoning reasoning_effort regex repetition_detection
    repetition_penalty require_reasoning response_format return_bytes return_entropy return_hidden_states
    return_logprob return_mm_kwargs return_pooled_hidden_states return_prompt_token_ids
    return_routed_experts return_sampling_mask return_token_ids return_token_offsets
    routed_experts_prompt_start routed_experts_start_len sampling_logprobs_mode sampling_params
    score_extraction_token seed separate_reasoning session_params skip_special_tokens
    spaces_between_special_tokens speculative_decoding stop stop_regex stop_sequences stop_token_ids
    stream_reasoning strict_tools structured_outputs suffix system task temperature template text text_1
    text_2 texts think thinking thinking_token_budget timestamp_granularities to_language
    token_ids token_ids_logprob token_indices_to_pool tokens tool_choice tools top_k top_logprobs
    top_logprobs_num top_n top_p truncate truncate_prompt_tokens truncation truncation_side use_activation
    use_audio_in_video use_beam_search video_config video_data video_max_dynamic_patch videos vllm_xargs
    watermark watermarking
    """.split()  # noqa: SIM905
)
# What templates are given of each message of a chat.
_OF_MESSAGES = frozenset(
    """
    audio content function_call name phase reasoning reasoning_content reasoning_details refusal role task
    thinking tool_call_id tool_calls tools type
    """.split()  # noqa: SIM905
)

_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_messages = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_value = msgspec.json.Decoder(object).decode
_in_one_spelling = msgspec.json.Encoder(order="deterministic").encode


async def prompt_hash(pool_id: PoolId, route: str, body: bytes) -> PromptHash | None:
    """The hash of a request's prompt; None if the request has no body. A large one is hashed in a thread."""
    if not body:
        return None
    if len(body) > LARGE_BYTES:
        return await asyncio.to_thread(hash_of, pool_id, route, body)
    return hash_of(pool_id, route, body)


def hash_of(pool_id: PoolId, route: str, body: bytes) -> PromptHash:
    """Like `prompt_hash`, in this thread."""
    hashed = blake2b(digest_size=PROMPT_HASH_BYTES)
    for part in (pool_id.encode(), route.encode("utf-8", "surrogateescape"), *_parts(body)):
        hashed.update(len(part).to_bytes(8, "little"))  # else the end of one part could begin the next
        hashed.update(part)
    return PromptHash(hashed.digest())


def _parts(body: bytes) -> list[bytes]:
    try:
        fields = _fields(body)
    except (ValueError, RecursionError):
        return [body]
    parts: list[bytes] = []
    for name in sorted(fields.keys() & _COMPUTED):
        written = bytes(fields[name])
        if written != b"null":
            parts += (name.encode(), *(_of_chat(written) if name == "messages" else [_spelled(written)]))
    return parts


def _of_chat(written: bytes) -> list[bytes]:
    """Of each message what engines read. An empty part begins a message."""
    try:
        messages = _messages(written)
    except (ValueError, RecursionError):  # no chat: the engine refuses it
        return [written]
    is_large = len(written) > LARGE_BYTES
    parts: list[bytes] = []
    for message in messages:
        parts.append(b"")
        for name in sorted(message.keys() & _OF_MESSAGES):
            value = bytes(message[name])
            parts += (name.encode(), value if is_large else _spelled(value))
    return parts


def _spelled(written: bytes) -> bytes:
    """A value in one spelling; as it is if it is large, or if its text is no Unicode.

    To read 6 MB of token ids would hold up all requests for 80 ms.
    """
    if len(written) > LARGE_BYTES:
        return written
    try:
        return _in_one_spelling(_value(written))
    except (ValueError, RecursionError):
        return written

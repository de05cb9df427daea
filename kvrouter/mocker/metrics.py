"""/metrics in vLLM's names and labels: what agents and dashboards read of a real engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvrouter.mocker.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(engines: Sequence[Engine], *, model_name: str, started_at_s: float, rejections: int) -> str:
    """The exposition text; one engine per data-parallel rank."""
    lines = [
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started_at_s}",
        "# TYPE vllm:admission_rejections_total counter",
        f'vllm:admission_rejections_total{{model_name="{model_name}",reason="max_num_queued_reqs"}} '
        f"{float(rejections)}",
    ]
    for rank, engine in enumerate(engines):
        labels = f'engine="{rank}",model_name="{model_name}"'
        lines += (f"{name}{{{labels}}} {float(value)}" for name, value in _values(engine))
        lines.append(f"vllm:cache_config_info{{{_cache_labels(engine)},{labels}}} 1.0")
    return "\n".join(lines) + "\n"


def _values(engine: Engine) -> Iterator[tuple[str, float]]:
    counters = engine.counters
    yield "vllm:num_requests_running", engine.num_running
    yield "vllm:num_requests_waiting", engine.num_waiting
    yield "vllm:kv_cache_usage_perc", engine.kv_usage
    yield "vllm:prefix_cache_queries_total", counters.cache_queries
    yield "vllm:prefix_cache_hits_total", counters.cache_hits
    yield "vllm:prompt_tokens_total", counters.prompt
    yield "vllm:prompt_tokens_cached_total", counters.cache_hits
    yield "vllm:generation_tokens_total", counters.generated
    yield "vllm:num_preemptions_total", counters.preemptions


def _cache_labels(engine: Engine) -> str:
    """Labels by which an agent learns block size and capacity."""
    config = engine.config
    labels = {
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_blocks,
        "num_cpu_blocks": config.host_blocks,
        "kv_cache_size_tokens": config.num_blocks * config.block_size,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "xxhash",
    }
    return ",".join(f'{name}="{value}"' for name, value in labels.items())

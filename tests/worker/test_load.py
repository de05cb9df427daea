"""Reading an engine's metrics."""

from __future__ import annotations

import pytest

from kvrouter.worker.load import RankLoad, Scrape, read_metrics

TEXT = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="tiny"} 0.0
vllm:cache_config_info{block_size="32",engine="0",num_cpu_blocks="None",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="32",engine="1",num_cpu_blocks="None",num_gpu_blocks="101"} 1.0
process_start_time_seconds 1795232300.5
"""


def test_read_metrics() -> None:
    """Load is per engine label; block size, capacity and start are the engine's."""
    assert Scrape(
        {0: RankLoad(3, 2, 0.25), 1: RankLoad(0, None, None)}, 32, 101, 0, 1795232300.5
    ) == read_metrics(TEXT)


def test_host_blocks() -> None:
    """A host tier's capacity is read if the engine tells it."""
    scrape = read_metrics(
        'vllm:cache_config_info{block_size="16",num_cpu_blocks="50",num_gpu_blocks="8"} 1.0'
    )

    assert (50, 8) == (scrape.host_blocks, scrape.device_blocks)


def test_nothing() -> None:
    """Metrics of another program tell nothing."""
    assert Scrape() == read_metrics("go_goroutines 7\n")


def test_malformed() -> None:
    """A line that is no sample is refused."""
    with pytest.raises(ValueError, match="could not convert"):
        read_metrics("vllm:num_requests_running{engine=\n")

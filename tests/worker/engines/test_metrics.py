"""Reading an engine's metrics."""

from __future__ import annotations

import pytest

from kvrouter.core.wire.values import MOST_AMOUNT, MOST_NAMES
from kvrouter.worker.engines.metrics import (
    MOST_LINE_CHARACTERS,
    MOST_LINES,
    MOST_PARSED_CHARACTERS,
    RankLoad,
    Scrape,
    read_metrics,
)

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


def test_speculative_decoding() -> None:
    """An engine that speculates has these counters from its start on."""
    counter = 'vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 0.0\n'

    assert read_metrics(TEXT + counter).speculates
    assert not read_metrics(TEXT).speculates


def test_host_blocks() -> None:
    """A host tier's capacity is read if the engine reports it."""
    scrape = read_metrics(
        'vllm:cache_config_info{block_size="16",num_cpu_blocks="50",num_gpu_blocks="8"} 1.0'
    )

    assert (50, 8) == (scrape.host_blocks, scrape.device_blocks)


@pytest.mark.parametrize(("awake", "is_asleep"), [("1.0", False), ("0.0", True)])
def test_sleep(awake: str, is_asleep: bool) -> None:
    """One sleeping rank is enough: vLLM sends all of them to sleep."""
    states = [("0", "awake", "1.0"), ("1", "awake", awake), ("1", "discard_all", "0.0")]
    text = "".join(
        f'vllm:engine_sleep_state{{engine="{engine}",sleep_state="{state}"}} {value}\n'
        for engine, state, value in states
    )

    assert is_asleep is read_metrics(text).is_asleep


def test_nothing() -> None:
    """The metrics of another program give no values."""
    assert Scrape() == read_metrics("go_goroutines 7\n")


def test_malformed() -> None:
    """A line that is not a sample is rejected."""
    with pytest.raises(ValueError, match="could not convert"):
        read_metrics("vllm:num_requests_running{engine=\n")


def test_extra_series() -> None:
    """Additional series count per rank: the largest sample; without a rank for all; never infinity."""
    text = TEXT + (
        'my:kind_total{engine="0",kind="a"} 3\nmy:kind_total{engine="0",kind="b"} 5\n'
        'my:kind_total{engine="1",kind="a"} 1\nmy:kind_total_other 9\nmy:room 0.5\nmy:limit +Inf\n'
    )
    own = {"kind": "my:kind_total", "room": "my:room", "limit": "my:limit", "absent": "my:none"}

    loads = read_metrics(text, own).loads

    assert {0: {"kind": 5.0, "room": 0.5}, 1: {"kind": 1.0, "room": 0.5}} == {
        rank: load.metrics for rank, load in loads.items()
    }
    assert (3, 2) == (loads[0].running, loads[0].waiting)
    assert {0: {"running": 3.0}} == {
        rank: load.metrics
        for rank, load in read_metrics(TEXT, {"running": "vllm:num_requests_running"}).loads.items()
        if rank == 0
    }
    assert {0: RankLoad(metrics={"room": 0.5})} == read_metrics("my:room 0.5\n", own).loads


def test_adapters() -> None:
    """The newest sample counts, in any order."""
    text = TEXT + (
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="b",waiting_lora_adapters=""} 200.5\n'
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a, c",waiting_lora_adapters="d"} 300.5\n'
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters="b"} 100.5\n'
    )

    scrape = read_metrics(text)

    assert 4 == scrape.max_loras == Scrape().or_else(scrape).max_loras
    assert [(("a", "c"), ("d",))] * 2 == [
        (load.running_loras, load.waiting_loras) for load in scrape.loads.values()
    ]
    assert (None, ()) == (
        read_metrics(TEXT).loads[0].running_loras,
        read_metrics(TEXT).loads[0].waiting_loras,
    )


def test_adapters_by_rank() -> None:
    """If adapters are reported by rank, each rank has its own."""
    text = "".join(
        f'vllm:lora_requests_info{{engine="{rank}",max_lora="1",running_lora_adapters="{name}"}} 1\n'
        for rank, name in enumerate("ab")
    )

    assert {0: ("a",), 1: ("b",)} == {
        rank: load.running_loras for rank, load in read_metrics(text).loads.items()
    }


RUNNING = 'vllm:num_requests_running{engine="0"}'
CONFIG = 'vllm:cache_config_info{block_size="%s",num_gpu_blocks="%s"} 1\n'


@pytest.mark.parametrize("number", ["1e300", "NaN", "+Inf", "-1", "9" * 400, str(2 * MOST_AMOUNT)])
def test_odd_number(number: str) -> None:
    """A number that no heartbeat can carry counts as not reported; the others count."""
    text = f"{RUNNING} {number}\nvllm:num_requests_waiting 2\nprocess_start_time_seconds {number}\n"

    assert Scrape({0: RankLoad(None, 2)}) == read_metrics(text)


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 400, "1" + "0" * 20, "-1", "1e3", "\u0663" * 30])
def test_odd_label(number: str) -> None:
    """The same holds for a number in a label: size and capacity are unknown then."""
    assert Scrape() == read_metrics(CONFIG % (number, number))


def test_odd_rank() -> None:
    """A sample with a rank out of range is ignored, not counted for rank 0."""
    text = "".join(f'vllm:num_requests_running{{engine="{rank}"}} 1\n' for rank in (0, 1024, 10**30))

    assert {0: RankLoad(1)} == read_metrics(text).loads


def test_extra_series_out_of_range() -> None:
    """Additional series may be negative, but neither NaN nor infinite."""
    text = 'a{engine="0"} -1\nb{engine="0"} NaN\nc{engine="0"} -Inf\n'

    (load,) = read_metrics(text, {name: name for name in "abc"}).loads.values()
    assert {"a": -1.0} == load.metrics


def test_duplicated_families() -> None:
    """If a sample repeats, the largest one counts, also if its family begins again."""
    text = f"# TYPE vllm:num_requests_running gauge\n{RUNNING} 3\nvllm:num_requests_waiting 1\n"

    assert {0: RankLoad(3, 1)} == read_metrics(text * 3 + f"{RUNNING} 2\n").loads


@pytest.mark.parametrize(
    "text",
    [
        "\n" * (MOST_LINES + 1),
        RUNNING[:-1] + ',a="' + "x" * MOST_LINE_CHARACTERS + '"} 1\n',
        f"{RUNNING} 1\n" * (MOST_PARSED_CHARACTERS // len(RUNNING)),
    ],
    ids=["lines", "a line", "all lines"],
)
def test_endless(text: str) -> None:
    """An exposition that would take long to read is rejected before it is parsed."""
    with pytest.raises(ValueError, match="more than"):
        read_metrics(text)


def test_endless_adapters() -> None:
    """At most as many adapters are reported as a heartbeat may name."""
    names = ",".join(str(number) for number in range(MOST_NAMES + 1))

    (load,) = read_metrics(f'vllm:lora_requests_info{{waiting_lora_adapters="{names}"}} 1\n').loads.values()
    assert MOST_NAMES == len(load.waiting_loras)


def test_llama_cpp() -> None:
    """llama.cpp's load counts for one rank; it reports no block size."""
    text = "llamacpp:requests_processing 3\nllamacpp:requests_deferred 2\nllamacpp:prompt_tokens_total 9\n"

    scrape = read_metrics(text)

    assert (RankLoad(3, 2), 0) == (scrape.loads[0], scrape.block_size)

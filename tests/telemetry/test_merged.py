"""Several processes' metrics as one text."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from kvrouter.telemetry.merged import SCRAPED, merged

HEAD = "# HELP k_many_total A counter\n# TYPE k_many_total counter\n"
ONE = HEAD + 'k_many_total{worker="a } \u2028b"} 3.0\n# HELP k_up A gauge\n# TYPE k_up gauge\nk_up 1.0\n'
TWO = HEAD + 'k_many_total{worker="c"} 4.0\n# HELP k_own Of one only\n# TYPE k_own gauge\nk_own 5.0\n'


async def test_merged() -> None:
    """Each sample has the label of its process; each family is in one place, with one head."""
    text = (await merged({"1": ONE.encode(), "2": TWO.encode()})).decode()

    assert text.startswith(
        HEAD
        + 'k_many_total{process="1",worker="a } \u2028b"} 3.0\nk_many_total{process="2",worker="c"} 4.0\n'
    )
    assert 'k_up{process="1"} 1.0\n' in text
    assert 'k_own{process="2"} 5.0\n' in text
    assert 1 == text.count("# HELP k_many_total")


async def test_missing_process() -> None:
    """A process without an answer is named; the text is still one that Prometheus reads."""
    text = (await merged({"1": ONE.encode(), "2": None})).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}

    assert [("1", 1.0), ("2", 0.0)] == [
        (sample.labels["process"], sample.value) for sample in families[SCRAPED].samples
    ]
    assert {"1"} == {sample.labels["process"] for sample in families["k_many"].samples}


async def test_others_run_between_slices() -> None:
    """A long text does not block the event loop."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await asyncio.sleep(0)
    await merged({"1": (HEAD + 'k_many_total{worker="c"} 4.0\n' * 10_000).encode()}, slice_s=0.0)
    task.cancel()

    assert turns > 100

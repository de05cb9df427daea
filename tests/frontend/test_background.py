"""Old texts of mode prefix-affinity are evicted by a timer."""

from __future__ import annotations

from kvrouter.core.tables.text_index import TextIndex, TextIndexSettings
from kvrouter.core.wire.ids import Target, WorkerId
from tests.frontend.fleet import POOL, FleetOf
from tests.frontend.workers import until

W0, W1 = Target(WorkerId("w0")), Target(WorkerId("w1"))


async def test_timer_cuts_what_is_above_the_threshold(fleet_of: FleetOf) -> None:
    """The eviction needs no request. A worker below the threshold keeps its texts."""
    settings = TextIndexSettings(1, True, 10_000, 5_000, 0.05)
    async with fleet_of() as fleet:
        texts = TextIndex(settings)
        for number in range(3000):
            texts.insert(W0, f"{number:04}----", float(number))
        texts.insert(W1, "x" * 9_000, 1.0)
        before = texts.chars(W0)
        fleet.frontend.replica.routers[POOL].tables.texts = texts
        await until(lambda: texts.chars(W0) <= 5_000, "they are cut")

        assert before > 10_000
        assert texts.chars(W0) > 4_900
        assert 8 == texts.match("2999----", [W0])[0], "the last one is kept"
        assert 9_000 == texts.chars(W1)
        texts.check()

"""Metrics of the index, and its bounds in /workers."""

from __future__ import annotations

from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ops import Check, Removed, Stored
from tests.frontend.fleet import POOL, FleetOf
from tests.frontend.workers import until
from tests.replica.agents import HASHES, Agent, blocks, first_reader

KV = ("--router-mode", "kv")
DIGEST = sum(HASHES[:3]) % 2**64


async def test_metrics(fleet_of: FleetOf) -> None:
    """Metrics contain blocks, holders, bytes, stores, removes, and the look-ups with their time."""
    async with fleet_of(*KV, publishes_events=True) as fleet:
        agent = Agent(fleet)
        agent.beat()
        agent.publish(Stored(0, None, pack_hashes(HASHES[:3])), Removed(0, pack_hashes(HASHES[2:3])))
        await until(lambda: blocks(fleet) == 2, "the frame is applied")
        await fleet.ask()
        lines = (await fleet.get("/metrics")).body.decode().splitlines()

        for line in (
            f'kvrouter_index_blocks{{pool="{POOL}"}} 2.0',
            f'kvrouter_index_changes_total{{change="stored",pool="{POOL}"}} 3.0',
            f'kvrouter_index_changes_total{{change="removed",pool="{POOL}"}} 1.0',
            f'kvrouter_index_changes_total{{change="refused",pool="{POOL}"}} 0.0',
            'kvrouter_step_seconds_count{step="lookup"} 1.0',
        ):
            assert line in lines
        assert any(line.startswith("kvrouter_index_bytes") for line in lines)


async def test_metrics_off(fleet_of: FleetOf) -> None:
    """With --no-index-metrics the index works and has no metrics."""
    async with fleet_of(*KV, "--no-index-metrics", publishes_events=True) as fleet:
        agent = Agent(fleet)
        agent.beat()
        agent.publish(Stored(0, None, pack_hashes(HASHES[:3])))
        await until(lambda: blocks(fleet) == 3, "the frame is applied")

        assert "3" == (await fleet.ask()).header("x-kvrouter-overlap-blocks")
        said = (await fleet.get("/metrics")).body
        assert b'step="lookup"' not in said
        assert b"kvrouter_index_bytes" not in said


async def test_truncated_target(fleet_of: FleetOf) -> None:
    """A block beyond the bound shows in /workers, and does not make the owner's digest a mismatch."""
    async with fleet_of(*KV, "--index-max-blocks", "2", publishes_events=True) as fleet:
        agent = Agent(fleet)
        await agent.listen()
        agent.beat()
        agent.publish(Stored(0, None, pack_hashes(HASHES[:3])), Check(3, DIGEST))
        reader = await first_reader(fleet)
        await until(lambda: reader.counters.applied == 1, "the frame is applied")
        (target,) = (await fleet.get("/workers")).json["targets"]
        fleet.frontend.audit.run()

        assert (2, True) == (blocks(fleet), target["truncated"])
        assert "--index-max-blocks" in fleet.frontend.audit.problems(POOL, "w0")[0].text
        assert (0, 0) == (reader.counters.digest_mismatches, agent.asked)

        agent.publish(Removed(0, pack_hashes(HASHES[2:3])), Check(2, sum(HASHES[:2]) % 2**64))
        await until(lambda: reader.counters.applied == 2, "the refused block is gone there, too")
        (target,) = (await fleet.get("/workers")).json["targets"]

        assert not target["truncated"]


async def test_predicted_times_to_first_token(fleet_of: FleetOf) -> None:
    """Sums by class of the prediction, of the classes in use; and by how much the choices were later."""
    async with fleet_of(*KV) as fleet:
        await fleet.ask()
        (router,) = fleet.frontends[0].replica.routers.values()
        router.bookings.calibration.decided(0.5, 0.25)
        router.bookings.calibration.measured(0.5, 0.75)
        router.bookings.calibration.measured(60.0, 90.0)
        lines = (await fleet.get("/metrics")).body.decode().splitlines()

    for line in (
        f'kvrouter_ttft_later_seconds_count{{pool="{POOL}"}} 1.0',
        f'kvrouter_ttft_later_seconds_sum{{pool="{POOL}"}} 0.25',
        f'kvrouter_ttft_seconds_count{{pool="{POOL}",time="measured",up_to_s="0.5"}} 1.0',
        f'kvrouter_ttft_seconds_sum{{pool="{POOL}",time="predicted",up_to_s="0.5"}} 0.5',
        f'kvrouter_ttft_seconds_sum{{pool="{POOL}",time="measured",up_to_s="+Inf"}} 90.0',
    ):
        assert line in lines
    assert 4 == sum(line.startswith("kvrouter_ttft_seconds_sum") for line in lines)

"""GET /tenants, and kvrouter_tenant_tokens_total."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta

import pytest

from kvrouter.frontend.records.tenant_totals import DAYS, TenantTotals
from tests.frontend.clients import get
from tests.frontend.fleet import BODY, FleetOf
from tests.frontend.test_client_totals import an_attempt
from tests.frontend.test_keys import Ring, ring
from tests.frontend.workers import OK

__all__ = ["ring"]


async def test_tenants(fleet_of: FleetOf, ring: Ring) -> None:
    """Tokens, requests and refusals of each; clients without a key are in none."""
    one, two = ring.add("one", "--tenant", "t"), ring.add("two", "--tenant", "t", "--model", "x")
    other = ring.add("other", "--requests-per-minute", "1")
    async with fleet_of(*ring.flags, "--router-mode", "kv", scripts=(OK,)) as fleet:
        for key in (one, one, two, other, other, "x-a: b", "authorization: Bearer operators"):
            await fleet.ask(BODY, key)
        rows = {row["tenant"]: row for row in (await fleet.get("/tenants")).json["tenants"]}
        assert {"t", "other"} == rows.keys()
        assert (3, 1, 0) == tuple(rows["t"][name] for name in ("requests", "refused", "failed"))
        assert (2, 1) == tuple(rows["other"][name] for name in ("requests", "refused"))
        for row, served in ((rows["t"], 2), (rows["other"], 1)):
            assert served * 64 == row["prompt_tokens"] == row["cached_tokens"] + row["computed_tokens"]
            assert row["seconds"] > 0
        answered = await fleet.get("/tenants?format=csv")
        found = list(csv.DictReader(io.StringIO(answered.body.decode())))
        assert ["other", "t"] == [row["tenant"] for row in found]
        assert str(rows["t"]["prompt_tokens"]) == found[1]["prompt_tokens"]
        text = (await get(fleet.frontend.admin_url, "/metrics")).body.decode()
        assert 'kvrouter_tenant_tokens_total{kind="prompt",tenant="t"} 128.0' in text
        assert [] == (await fleet.get("/tenants?day=2020-01-01")).json["tenants"]
        for wrong in ("day=x", "format=xml"):
            assert 400 == (await fleet.get(f"/tenants?{wrong}")).status


async def test_days() -> None:
    """A month of days is kept; the metric goes on."""
    now = [datetime(2027, 1, 1, 23, tzinfo=UTC)]
    totals = TenantTotals(lambda: datetime.timestamp(now[0]))
    last = an_attempt(prompt_tokens=10, overlap_tokens=4)
    for _ in range(DAYS + 5):
        totals.count("t", last, 1, "ok", 0.0)
        now[0] += timedelta(days=1)

    days = totals._days
    assert DAYS == len(days)
    assert now[0].date() - timedelta(days=1) == max(days)
    assert [each * (DAYS + 5) for each in (10, 4, 6, 1)] == [tokens for _, _, tokens in totals.samples()]


@pytest.mark.parametrize("path", ["/tenants"])
async def test_without_keys(fleet_of: FleetOf, path: str) -> None:
    """There are none."""
    async with fleet_of(scripts=(OK,)) as fleet:
        await fleet.ask()
        assert [] == (await fleet.get(path)).json["tenants"]

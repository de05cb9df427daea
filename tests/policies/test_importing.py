"""--router-policy: finding the class, converting its arguments, and errors at start-up."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from kvrouter.errors import ConfigError
from kvrouter.policies.guarded import GuardedPolicy
from kvrouter.policies.importing import GuardedPolicies, guarded, load_custom_policy
from tests.policies.guarded_classes import Alone, Last, NoInterval
from tests.policies.tables import candidate, picked

HERE = "tests.policies.guarded_classes"


def made(name: str, *arguments: str) -> GuardedPolicy:
    """The first policy of a class in guarded_classes."""
    policies = load_custom_policy(f"{HERE}:{name}", arguments)
    policies.begin()
    return policies()


def test_found() -> None:
    """A class is found by module and name, with or without the base class."""
    assert isinstance(made("Last").policy, Last)
    assert f"{HERE}:Last" == made("Last").name
    assert isinstance(made("Alone").policy, Alone)


def test_found_where_kvrouter_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current directory is found, also if a console script started kvrouter."""
    (tmp_path / "mine_here.py").write_text("class Mine:\n    def choose(self, request, candidates): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])

    assert "mine_here:Mine" == load_custom_policy("mine_here:Mine").name


def test_arguments_are_converted_to_the_annotated_types() -> None:
    """Text, number, bool and path; defaults stay."""
    policy = made("Last", "greeting=a=b", "weight=2", "flag=true", "at=/tmp").policy

    assert isinstance(policy, Last)
    assert ("a=b", 2.0, True, Path("/tmp")) == policy.arguments
    plain = made("Last").policy
    assert isinstance(plain, Last)
    assert ("", 1.0, False, None) == plain.arguments


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("no_such_module:Mine", [], "no module 'no_such_module'; install it, or start kvrouter in"),
        (f"{HERE}.deeper:Mine", [], f"no module '{HERE}.deeper'"),
        (f"{HERE}:Lst", [], f"{HERE} has no Lst; its classes: Last, Returns, Alone, "),
        (":Mine", [], "write package.module:Class"),
        (f"{HERE}:NO_CLASS", [], "is not a class"),
        (f"{HERE}:NoChoose", [], "has no choose(self, request, candidates)"),
        (f"{HERE}:AsyncChoose", [], "choose has to be a plain def"),
        (
            f"{HERE}:FewArguments",
            [],
            "write choose(self, request: RouteRequest, candidates: ",
        ),
        (f"{HERE}:PlainRefresh", [], "refresh has to be async def"),
        (f"{HERE}:Last", ["weight"], "--router-policy-arg 'weight': write KEY=VALUE"),
        (f"{HERE}:Last", ["wieght=2"], "takes no 'wieght'; it takes: greeting, weight, flag, at"),
        (f"{HERE}:Last", ["weight=much"], "--router-policy-arg 'weight=much': Expected `float`"),
        (f"{HERE}:Returns", [], "missing a required argument: 'answer'; give it with --router-policy-arg"),
        (
            "zoned",
            [],
            "policy 'zoned' is not an entry point in the group kvrouter.policies (installed: none)",
        ),
    ],
)
def test_errors_at_start_up(name: str, arguments: list[str], message: str) -> None:
    """Each error states what to change."""
    with pytest.raises(ConfigError) as raised:
        load_custom_policy(name, arguments)

    assert message in str(raised.value)


def test_module_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside the module is reported as such, not as a missing module."""
    (tmp_path / "mine_broken.py").write_text("import no_such_thing_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigError, match="importing mine_broken failed: ModuleNotFoundError"):
        load_custom_policy("mine_broken:Mine")


def test_constructor_that_fails() -> None:
    """It is an error at start-up; for a later pool, requests go by load."""
    policies = load_custom_policy(f"{HERE}:NotMade")

    with pytest.raises(ConfigError, match="could not be made: OSError: no such store"):
        policies.begin()
    later = policies()
    assert ["b"] == picked(later, [candidate("a", requests=1), candidate("b")])
    assert ["__init__", "choose"] == [news.where for news in later.take_news()]


def test_refresh_without_an_interval() -> None:
    """It is rejected: the refresh would never run."""
    with pytest.raises(ConfigError, match=r"no interval: set one, as in refresh_s = 1\.0"):
        guarded(NoInterval(), "mine")


def test_interval_that_is_not_a_number() -> None:
    """NaN is rejected, too: the refresh would never run."""
    with pytest.raises(ConfigError, match="refresh_s is nan"):
        guarded(type("Odd", (NoInterval,), {"refresh_s": float("nan")})(), "mine")


def test_one_policy_for_each_pool() -> None:
    """The policy made at start-up serves the first pool; each other pool gets a new one."""
    policies = GuardedPolicies("last", Last)
    policies.begin()

    assert policies().policy is not policies().policy


def test_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package can name its policy; a wrong name lists the installed ones."""
    points = EntryPoints([EntryPoint("last", f"{HERE}:Last", "kvrouter.policies")])
    monkeypatch.setattr("kvrouter.policies.importing.entry_points", lambda group: points.select(group=group))

    assert Last is load_custom_policy("last").make
    with pytest.raises(ConfigError, match=r"'first' is not an entry point .* \(installed: last\)"):
        load_custom_policy("first")

"""A real prefill and a real decode engine of SGLang behind `kvrouter serve`, against a whole one.

    scripts/test-sglang DIR --pd

SGLang has no hand-over on a CPU: what it asks of CUDA around one (pinned memory, events, streams) is replaced
in its processes by nothing, as a CPU has nothing to wait for. Bytes go over Mooncake's TCP, from DIR/mooncake
as `scripts/test-vllm --build DIR` makes it (with libibverbs1, or its files in DIR/ibverbs).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from scripts.kit.deployment import Stage as Common
from scripts.kit.deployment import open_stage
from scripts.kit.engine_tests.adapters import write_weights
from scripts.kit.engine_tests.engines import Engine, EngineTest, find_program, start_engine, wait_until_up
from scripts.kit.engine_tests.pairs import AT_ONCE, PairError, Row, ask, is_handed, predictions, prompts
from scripts.kit.engine_tests.stage import Stage, serve_engines
from scripts.kit.ports import free_ports
from scripts.kit.script import new_console, run, table_of

LENGTHS = (1, 31, 32, 33, 200, 1500)
NUM_BLOCKS = 320
_ROLES = ("prefill", "decode", "null")
_SITE = """
import os, sys
os.sched_setaffinity = lambda *_: None
class Nothing:
    def __init__(self, *_, **__): pass
    def __getattr__(self, _): return lambda *_: 0
    def query(self): return True
def unpinned(make):
    def made(*arguments, **named):
        named.pop("pin_memory", None)
        return make(*arguments, **named)
    return made
class BeforeSglang:
    def find_spec(self, name, path=None, target=None):
        torch = sys.modules.get("torch")
        if name.startswith("sglang.srt") and hasattr(torch, "accelerator"):
            sys.meta_path.remove(self)
            for make in ("empty", "zeros", "full", "ones"):
                setattr(torch, make, unpinned(getattr(torch, make)))
            torch.cuda.cudart = torch.cuda.Event = torch.Event = Nothing
            torch.cuda.current_stream = lambda *_: None
            torch.accelerator.current_device_index = lambda: 0
sys.meta_path.insert(0, BeforeSglang())
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the test; exit code 0 only if everything was as with one engine."""
    parser = argparse.ArgumentParser(prog="scripts/test-sglang DIR --pd", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    return run("test-sglang", _run(parser.parse_args(arguments).directory.absolute()))


async def _run(directory: Path) -> int:
    console = new_console()
    program = find_program("sglang", directory)
    async with open_stage("test-sglang", starts_nats=False) as common:
        write_weights(common.model_path, 3)
        test = EngineTest("sglang", program, common.model_path, {}, NUM_BLOCKS)
        (port,) = free_ports(1)
        engines = [await _start(common, test, directory, role, port) for role in _ROLES]
        await wait_until_up(common.client, common.fleet, engines)
        *pair, whole = engines
        flags, named = ["--router-mode=kv", "--router-replica-sync"], [engine.named() for engine in pair]
        stage = await serve_engines(common.fleet, common.client, pair, named, flags)
        rows = [*await _lengths(stage, whole), await _at_once(stage, whole)]
        seen = await predictions(stage, {"exact"})
        rows.append(await _without_prefill(stage))
    console.print(table_of("a pair of SGLang engines", ("request", "handed over", "seen"), rows))
    console.print(seen)
    return 0


async def _start(common: Common, test: EngineTest, directory: Path, role: str, port: int) -> Engine:
    site = common.directory / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE, "utf-8")
    environment = {
        "PYTHONPATH": f"{site}:{directory / 'mooncake'}",
        "LD_LIBRARY_PATH": str(directory / "ibverbs"),
        "MC_FORCE_TCP": "1",
    }
    flags = ["--load-format", "auto"]
    if role != "null":
        flags += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake_tcp"]
        flags += ["--disaggregation-bootstrap-port", str(port)]
    return await start_engine(common.fleet, test, _ROLES.index(role), flags, environment)


async def _lengths(stage: Stage, whole: Engine) -> list[Row]:
    """Prompts of many lengths, whole and streamed, at both replicas in turn; and again, cached."""
    rows = list[Row]()
    for number, length in enumerate(LENGTHS):
        (prompt,) = prompts(number, 1, length)
        alone = await ask(stage.client, whole.url, prompt)
        for stream in (False, True):
            reply = await ask(stage.client, stage.replicas[number % 2].url, prompt, stream=stream)
            if (reply.status, reply.text) != (200, alone.text) or not is_handed(reply):
                raise PairError(f"{length} tokens: {reply} instead of {alone.text!r}")
            await stage.until_equal()
        rows.append(
            (f"{length:,} tokens, whole, then streamed", "twice", f"equal; {reply.cached_tokens} cached")
        )
    return rows


async def _at_once(stage: Stage, whole: Engine) -> Row:
    many = prompts(99, AT_ONCE, 250)
    replies = await asyncio.gather(*[ask(stage.client, stage.replicas[0].url, one) for one in many])
    for prompt, reply in zip(many, replies, strict=True):
        if reply.text != (await ask(stage.client, whole.url, prompt)).text:
            raise PairError(f"at once: {reply}")
    return f"{AT_ONCE} at once", f"{AT_ONCE} prompts", "equal"


async def _without_prefill(stage: Stage) -> Row:
    """A decode engine serves nothing alone."""
    await stage.fleet.processes[stage.engines[0].name].kill()
    (prompt,) = prompts(100, 1, 200)
    statuses = [(await ask(stage.client, stage.replicas[0].url, prompt)).status for _ in range(2)]
    if not {*statuses} <= {502, 503}:
        raise PairError(f"prefill engine killed: {statuses}")
    return "prefill engine killed", "", f"{statuses[0]}, {statuses[1]}"

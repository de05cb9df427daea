"""What `kvrouter serve` says itself: a report of each engine, the line at the end of its start.

With --log-format console these are lines of text, with json they are events with level and time.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import structlog

from kvrouter.core.wire.heartbeats import BOTH
from kvrouter.processes.output import Output
from kvrouter.serve.tokenizers import TokenizerReport
from kvrouter.worker.engines.facts import EngineFacts, with_discovered
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints

log = structlog.get_logger()

NAME = "serve"

# At most this many warnings are repeated before the line at the end of the start.
MOST_WARNINGS = 10
# lines of logs in text, of settings (read before logs are set up), and of logs in JSON
_WARNING = re.compile(
    rb"\[(?:warning|error|critical) *\] *(.*)|^kvrouter \w+: (the variable .*)"
    rb'|"level": ?"(?:warning|error|critical)"'
)
_NO_FACTS = {"event", "level", "timestamp", "process"}
_COLOURS = re.compile(rb"\033\[[\d;]*m")
# The report of the engine says it already; a wait that was said is over once the start is.
_REPORTED = (b"frontend.no_tokenizer", b"engine.lacks", b".awaited")


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine as it reports itself; 0 means unknown. `lacks`: each with its remedy."""

    worker: str
    url: str
    engine: str
    model: str
    loras: tuple[str, ...]
    block_size: int
    blocks: int
    host_blocks: int
    ranks: int
    events: tuple[str, ...]
    events_not_used: str
    replay: tuple[str, ...]
    tokenizer: str
    lacks: tuple[str, ...]
    role: str = BOTH
    kv_connector: str = ""

    def lines(self) -> Iterator[str]:
        loras = f", LoRA: {', '.join(self.loras)}" if self.loras else ""
        capacity = f"{self.blocks:,} ({self.blocks * self.block_size:,} tokens)" if self.blocks else "unknown"
        host = f", {self.host_blocks:,} in host memory" if self.host_blocks else ""
        unused = f" (not used: {self.events_not_used})" if self.events_not_used else ""
        yield f"engine {self.worker} at {self.url}: {self.engine}"
        yield f"  model       {self.model}{loras}"
        if self.role != BOTH:
            yield f"  role        {self.role}, connector {self.kv_connector}"
        yield f"  block size  {self.block_size} tokens"
        yield f"  blocks      {capacity}{host}"
        yield f"  ranks       {self.ranks}"
        yield f"  events      {', '.join(self.events) + unused if self.events else 'none: placed by load'}"
        if self.events:
            yield f"  replay      {', '.join(self.replay) or 'none'}"
        yield f"  tokenizer   {self.tokenizer}"
        for lack in self.lacks:
            yield f"  ! {lack}"


def report(
    options: AgentOptions, facts: EngineFacts, tokenizer: TokenizerReport, *, no_events: str = ""
) -> EngineReport:
    """The report of one engine. `no_events`: the flag that keeps the frontends from using events, if any."""
    settled, models, scrape = with_discovered(options, facts), facts.models, facts.scrape
    return EngineReport(
        worker=options.worker_id,
        url=options.engine_url,
        engine=f"{facts.kind} {facts.version}".rstrip(),
        model=options.model or ", ".join(models.served_names),
        loras=tuple(models.lora_names),
        block_size=facts.block_size(options),
        blocks=scrape.device_blocks,
        host_blocks=scrape.host_blocks,
        ranks=settled.ranks,
        events=tuple(_endpoint_text(feed) for feed in settled.endpoints),
        events_not_used=no_events,
        replay=tuple(feed.replay for feed in settled.endpoints if feed.replay),
        tokenizer=tokenizer.text,
        lacks=tuple(filter(None, (*facts.lacks, tokenizer.lack))),
        role=facts.role,
        kv_connector=facts.kv_connector,
    )


@dataclass(frozen=True, slots=True)
class Ready:
    """A deployment that serves. `engines`: those known, of `configured`."""

    url: str
    admin: str
    models: tuple[str, ...]
    engines: int
    configured: int
    routing: str
    curl: str

    def line(self) -> str:
        workers = (
            f"{self.engines}" if self.engines == self.configured else f"{self.engines} of {self.configured}"
        )
        plural = "worker" if workers == "1" else "workers"
        facts = f"{', '.join(self.models)}, {workers} {plural}, {self.routing}"
        return f"ready: {self.url} ({facts}) · admin {self.admin} · try: {self.curl}"


def curl(url: str, model: str, prompt: str | Sequence[int]) -> str:
    """A command that asks for one completion."""
    insecure = "-k " if url.startswith("https:") else ""  # its certificate may not name this address
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 16}, ensure_ascii=False)
    return f"curl {insecure}{url}/v1/completions -H 'content-type: application/json' -d {shlex.quote(body)}"


def _fact(line: str) -> str:
    """An event in JSON as the console has it, without its time; the line itself if it is none."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line
    values = (f"{name}={value}" for name, value in fields.items() if name not in _NO_FACTS)
    return " ".join([str(fields.get("event", "")), *values])


class Voice:
    """Prints or logs, and keeps the warnings until the start is over, so that they can be repeated then.

    `hear` sees each line of the output, also those of the child processes.
    """

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._warnings: dict[str, None] = {}
        self._is_starting = True
        self._output: Output | None = None

    def speak_to(self, output: Output) -> None:
        self._output = output

    def hear(self, name: str, line: bytes) -> None:
        """Keep the line if it is a warning. The same text of another process or time is not kept again."""
        if len(line) > 4096:
            return
        found = _WARNING.search(line := _COLOURS.sub(b"", line))
        if found is None or any(event in line for event in _REPORTED):
            return
        text = (found[1] or found[2] or line).decode(errors="replace")
        self._keep(" ".join((_fact(text) if line.startswith(b"{") else text).split()))

    def engine(self, report: EngineReport) -> None:
        for lack in report.lacks:
            self._keep(f"{report.worker}: {lack}")
        if not self._is_json:
            for line in report.lines():
                self._print(line)
            return
        fields = {name: value for name, value in asdict(report).items() if name != "lacks"}
        log.info("serve.engine", **fields)
        for lack in report.lacks:
            log.warning("serve.engine_lacks", worker=report.worker, lack=lack)

    def note(self, event: str, text: str) -> None:
        """Say it, with no need to repeat it."""
        if self._is_json:
            log.info(event, text=text)
        else:
            self._print(text)

    def warn(self, event: str, text: str) -> None:
        self._keep(text)
        if self._is_json:
            log.warning(event, text=text)
        else:
            self._print(text)

    def ready(self, ready: Ready) -> None:
        """The last line of the start, after the warnings so far; from then on only the line."""
        if self._is_json:
            log.info("serve.ready", **asdict(ready), warnings=[*self._warnings])
        else:
            for warning in self._warnings:
                self._print(f"! {warning}")
            self._print(ready.line())
        self._is_starting = False
        self._warnings.clear()

    def failed(self, text: str) -> None:
        if self._is_json:
            log.error("serve.failed", error=text)
        else:
            self._print(text, is_error=True)

    def _keep(self, text: str) -> None:
        if self._is_starting and len(self._warnings) < MOST_WARNINGS:
            self._warnings[text] = None

    def _print(self, line: str, *, is_error: bool = False) -> None:
        assert self._output is not None
        self._output.line(NAME, line.encode(), is_error=is_error)


def _endpoint_text(feed: EventEndpoints) -> str:
    return f"{feed.events} (the engine connects to it)" if "*" in feed.events else feed.events

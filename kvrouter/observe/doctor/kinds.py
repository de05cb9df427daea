"""Every kind of finding: how bad it is, what to do, and where the docs explain it. See docs/doctor.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
# In the order in which one explains the next.
AREAS = ("nats", "fleet", "agent", "engine", "events", "replica", "tls", "clock", "machine", "doctor")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding. `see`: a page below docs/, with the section."""

    code: str
    severity: Severity
    see: str
    title: str
    remedy: str

    @property
    def area(self) -> str:
        return self.code.partition(".")[0]


def order(kind: Kind) -> tuple[int, int, str]:
    """Sorts kinds: by severity, then by area."""
    return SEVERITIES.index(kind.severity), AREAS.index(kind.area), kind.code


_NATS, _SERVERS, _WHO = "operations.md#nats", "deploy.md#nats", "operations.md#who-is-there"
_EVENTS, _BROKEN = "engines.md#what-is-learnt-from-an-engine", "operations.md#when-something-breaks"
_AGREE, _READ = "operations.md#do-the-replicas-agree", "operations.md#messages-that-cannot-be-read"
_TOKENS, _UPGRADE, _PORTS = "tokens.md#comparison", "deploy.md#upgrade", "deploy.md#ports-rights-secrets"
_READY, _TLS, _STREAMS = "operations.md#readiness", "operations.md#tls", "operations.md#how-many-streams"
_OPERATORS, _OUT = "operations.md#endpoints-for-operators", "operations.md#taking-a-worker-out-of-service"
_PREDICTED, _DOCTOR = "operations.md#predictions-against-the-truth", "doctor.md"

# code, severity, section of the docs, title, and the remedy below
_ALL = (
    # NATS
    Kind("nats.unreachable", "error", _NATS, "A NATS server does not answer",
         "start it, or correct --nats; look at the firewall between this machine and it"),
    Kind("nats.not_nats", "error", _NATS, "Something else answers on the port of NATS",
         "correct --nats, or end the program that took the port; restart NATS if it is NATS that hangs"),
    Kind("nats.rejected", "error", _NATS, "NATS rejects this client",
         "give the credentials that frontends use: --nats-nkey, --nats-creds, --nats-user, "
         "--nats-token-file, --nats-tls-ca"),
    Kind("nats.denied", "error", _SERVERS, "NATS denies a subject that is needed",
         "give the NATS user the rights of `verify` or `frontend` (kvrouter nats-accounts)"),
    Kind("nats.split", "error", _SERVERS, "A NATS server does not hear processes that another one hears",
         "make the servers one cluster: `cluster { name, routes }` on each, with the same name, and open "
         "the port of the routes; or give all processes the same --nats"),
    Kind("nats.clusters", "warning", _SERVERS, "The NATS servers are not of one cluster",
         "list only servers of one cluster in --nats: kvrouter reconnects to any of them"),
    Kind("nats.old", "warning", _NATS, "A NATS server is older than 2.10",
         "upgrade it"),
    Kind("nats.max_payload", "error", _NATS,
         "NATS's limit for a message is too small: snapshots and large frames are lost",
         "set `max_payload: 1MB` (at least 513 KiB) in the server's configuration"),
    Kind("nats.slow", "warning", _SERVERS, "NATS answers slowly: replicas decide with old load and blocks",
         "look at the load of the NATS server and at the network; place NATS near the frontends"),
    Kind("nats.unstable", "warning", _NATS, "The connection to NATS was lost while listening",
         "look at the log of the NATS server (slow consumers, limits) and at the network"),
    # who is there
    Kind("fleet.silent", "error", _WHO, "No process of this namespace publishes on NATS",
         "check --namespace and --nats of agents and frontends: they must be those given here"),
    Kind("fleet.no_workers", "error", _WHO, "No agent publishes heartbeats",
         "start `kvrouter worker` for each engine with this --nats and --namespace, and look at the "
         "agents' logs"),
    Kind("fleet.no_replicas", "warning", _WHO, "No frontend publishes heartbeats",
         "start `kvrouter frontend` with this --nats and --namespace"),
    Kind("fleet.unreadable", "warning", _READ, "Messages of this namespace cannot be read",
         "compare the versions of all processes; look for a program that publishes below "
         "kvrouter.NAMESPACE"),
    Kind("fleet.block_sizes", "warning", "engines.md#block-sizes",
         "Engines of one model have different block sizes",
         "give all engines of a model one --block-size: no overlap is predicted for the others"),
    Kind("fleet.versions", "note", _UPGRADE, "Processes have different versions of kvrouter",
         "normal during an upgrade of neighbouring versions; finish it"),
    # agents
    Kind("agent.twice", "error", _WHO, "Two agents publish under one worker id",
         "stop one of them, or give each engine its own --worker-id"),
    Kind("agent.no_card", "warning", _WHO, "An agent has sent no card: replicas do not use its worker",
         "look at the agent's log (worker.failed, nats.unsent), and restart it"),
    Kind("agent.late", "warning", _WHO, "Heartbeats come irregularly: the worker may be taken as lost",
         "look at the load of the agent's machine and of NATS"),
    Kind("agent.lost", "warning", _BROKEN, "Replicas know a worker whose agent is silent here",
         "look whether the agent still runs and reaches NATS; its worker is dropped when its lease ends"),
    Kind("replica.lost", "warning", _BROKEN, "Replicas know a replica that is silent here",
         "look whether it still runs and reaches NATS; its bookings count until its lease ends"),
    Kind("agent.no_answer", "error", _SERVERS,
         "An agent does not answer requests for its blocks: replicas cannot repair what they miss",
         "restart the agent; look whether NATS lets it subscribe to kvrouter.NAMESPACE.kv-replay.ID, and "
         "publish answers"),
    Kind("replica.draining", "note", _READY, "A replica drains: it finishes its requests and ends",
         "nothing, if someone restarts it"),
    Kind("replica.losses", "note", _WHO, "A replica has lost workers or other replicas since its start",
         "look for worker.lost and replica.lost in its log: they name who fell silent, and when"),
    Kind("agent.partial", "warning", "concepts/glossary.md#partial-ranks",
         "An agent does not know all blocks of its engine: too little overlap is predicted",
         "start engines with a replay endpoint and before their agents; it heals when the engine "
         "restarts or has emptied its cache"),
    Kind("agent.shared_engine", "warning", _WHO,
         "Several agents have announced one engine: only the worker of the last one gets requests",
         "stop all of their agents but one"),
    Kind("agent.no_events", "warning", _EVENTS,
         "An agent has no KV events: no overlap is predicted for its worker",
         "start the engine with KV events (vLLM: --kv-events-config), and its agent with --kv-events; or "
         "run the frontends with --no-use-kv-events"),
    Kind("agent.other_events", "warning", _EVENTS,
         "An agent reads KV events at another port than its engine reports",
         "compare --kv-events and --kv-replay of the agent with the engine's /kv_event_sources, and "
         "restart it with the engine's own; another port is right only where ports are mapped: accept "
         "that with --ignore agent.other_events"),
    Kind("agent.no_prefix_caching", "warning", _EVENTS,
         "An engine runs without prefix caching: no prompt is ever cached",
         "start the engine with prefix caching (vLLM: --enable-prefix-caching)"),
    Kind("agent.draining", "note", _OUT, "A worker drains or has no requests by order",
         "nothing, if someone takes it out of service"),
    # engines
    Kind("engine.down", "error", _BROKEN, "An agent reports that its engine is down",
         "look at the engine's log, and start it again"),
    Kind("engine.unreachable", "error", _WHO, "An engine does not answer at the URL of its card",
         "start it, or correct --engine-url or --advertise-url of its agent: frontends use that URL. A "
         "loopback address works on one machine only"),
    Kind("engine.not_found", "error", _PREDICTED, "An engine is up and answers every request with 404",
         "give its agent the URL under which the engine has /v1, with the path of a gateway "
         "(--engine-url, --advertise-url), or correct the names that the engine lists"),
    Kind("engine.unhealthy", "error", _BROKEN, "An engine answers, but not as a healthy one",
         "look at the engine's log"),
    Kind("engine.other_model", "error", _EVENTS, "An engine does not serve the model of its card",
         "restart its agent, or correct --engine-url: another server may have taken the port"),
    Kind("engine.different", "error", _EVENTS, "An agent publishes other blocks than its engine holds",
         "compare --kv-events and --kv-replay of the agent with the engine's /kv_event_sources; if they "
         "are right, keep the agent's log for a report, and restart the agent"),
    Kind("engine.no_blocks", "error", _EVENTS, "An engine fills blocks, and replicas know none of them",
         "compare --kv-events of the agent with the engine's endpoint (vLLM: /kv_event_sources); look at "
         "the agent's log"),
    Kind("engine.capacity", "warning", "runbook.md#kvroutercapacityfell",
         "An engine has room for far fewer blocks than the others of its model",
         "start it with the settings of the others (vLLM: --gpu-memory-utilization, "
         "--num-gpu-blocks-override), and look whether another process holds memory of its GPU; nothing, "
         "if its GPU is smaller"),
    Kind("engine.no_blocks_known", "warning", _EVENTS,
         "An engine has filled blocks since its start, and replicas know none of them",
         "normal after a reset of its prefix cache; else compare --kv-events of the agent with the "
         "engine's endpoint, and look at the agent's log"),
    Kind("engine.not_asked", "note", _EVENTS, "An engine wants a key, so it was not examined",
         "give --engine-api-key-file"),
    Kind("engine.old", "warning", "engines.md#versions", "An engine is too old for exact events",
         "upgrade it"),
    Kind("engine.slow", "warning", _OUT,
         "A worker's answers begin much later than those of the other workers of its pool",
         "look at its GPU (clocks, temperature, power: nvidia-smi -q -d PERFORMANCE), at other programs "
         "on its machine and at its network; if many requests wait there, at why they are sent there. "
         "Until then, take it out of service"),
    Kind("engine.versions", "note", _EVENTS, "Engines of one model have different versions",
         "normal during an upgrade; templates and block names may differ between versions"),
    # events on the way
    Kind("events.gaps", "warning", "reliability.md#what-is-promised",
         "Frames were lost on the way from agents or replicas to this machine",
         "look at NATS (slow consumers, its CPU) and at the network: replicas repair gaps, with delay"),
    Kind("events.order", "warning", _READ, "Frames came twice or out of order",
         "look for a second program that publishes under this name"),
    Kind("events.unreadable", "warning", _READ, "Frames cannot be read",
         "compare the versions of all processes"),
    Kind("events.feed_stuck", "warning", _AGREE, "A replica does not follow a feed",
         "look at the log of that agent or replica: it must answer requests on NATS; restart it if it "
         "does not"),
    Kind("events.contradictions", "warning", _AGREE,
         "A replica's copy contradicted its owner while listening",
         "look for two agents with one worker id and for foreign publishers; if there are none, report "
         "it"),
    # replicas
    Kind("replica.unreachable", "error", _OPERATORS, "A given replica does not answer",
         "start it, or correct the URL; it is that of the admin listener (--admin-port, --port + 100)"),
    Kind("replica.not_examined", "note", _OPERATORS, "A replica's admin listener is not reachable from here",
         "run `kvrouter doctor` on its machine, or give it --admin-host and --advertise"),
    Kind("replica.impostor", "error", _PORTS, "Something else answers at the address of a replica",
         "correct the URL; else another program has taken the port, or --advertise names another host"),
    Kind("replica.not_operators", "warning", _OPERATORS, "A replica does not show its state at this URL",
         "give the URL of its admin listener (--admin-port, by default --port + 100), and "
         "--admin-key-file if that is not on this machine's loopback"),
    Kind("replica.stranger", "error", _WHO, "A given replica is not in this namespace",
         "compare --namespace and --nats of the replica with those given here"),
    Kind("replica.shared_port", "warning", "operations.md#several-processes-on-one-port",
         "A URL leads to several replicas, or to one that has just restarted",
         "several processes share the port: give the admin ports of each (--admin-port + 1, …)"),
    Kind("replica.not_ready", "error", _READY, "A replica takes no requests",
         "its reasons say what is missing"),
    Kind("replica.degraded", "warning", _READY, "A replica serves, but something is wrong",
         "its reasons say what"),
    Kind("replica.clients_port", "error", _PORTS, "The clients' port of a replica does not answer",
         "look at the replica's log and the firewall; clients get no answer there"),
    Kind("replica.problem", "warning", _PREDICTED, "A replica reports a problem of a worker or model",
         "the text names the remedy"),
    Kind("replica.other_workers", "warning", _AGREE, "A replica does not know a worker that publishes here",
         "look at its log; its connection to NATS may be to another server or cluster"),
    Kind("replica.other_replicas", "warning", _AGREE,
         "A replica does not know another one: it books without its load",
         "look at its log; its connection to NATS may be to another server or cluster"),
    Kind("replica.alone", "warning", _AGREE, "Replicas do not share their bookings",
         "start all of them with --router-replica-sync"),
    Kind("replica.different", "error", _AGREE,
         "Replicas, or a replica and an agent, hold different blocks or bookings",
         "restart the replica that differs; keep its /workers and log for a report"),
    Kind("replica.not_compared", "note", _AGREE, "Not everything was compared",
         "repeat it with more time (--timeout-s); nothing, if the engine has no replay of it"),
    Kind("replica.routing", "warning", "operations.md#changing-the-routing-of-all-replicas",
         "Replicas route by different settings",
         "send POST /routing again to one replica, with reset: true if a change was refused; a replica "
         "that does not follow is of another version"),
    Kind("replica.tokens", "error", _TOKENS,
         "A replica makes other token ids than an engine: no cached prefix is found",
         "the text names the remedy; mostly --model-path or --chat-template"),
    Kind("replica.tokens_unknown", "note", _TOKENS, "Token ids were not compared with an engine's",
         "engines need /tokenize for it; predictions are checked by what engines report, too"),
    Kind("replica.prompts", "error", _TOKENS, "Replicas make different token ids of one chat",
         "give all replicas the same --model-path, --chat-template and --tokenizer"),
    Kind("replica.ways", "warning", "tokens.md#which-way-serves",
         "Replicas turn chats into token ids in different ways",
         "give all replicas the same --model-path, --tokenizer-root and --tokenizer; /workers says why a "
         "better way does not serve"),
    Kind("replica.descriptors", "warning", _STREAMS, "A replica has few file descriptors left",
         "raise its limit (LimitNOFILE=, --ulimit nofile=), or start more processes"),
    Kind("replica.admin_open", "warning", _PORTS, "An admin listener is open to the network, without a key",
         "update it: this version asks such peers for the key of --admin-key-file; until then set "
         "--admin-host 127.0.0.1"),
    Kind("tls.not_trusted", "warning", _TLS, "A certificate is not accepted here",
         "give its authority: --tls-ca for replicas, --worker-tls-ca for engines"),
    Kind("tls.expires", "warning", _TLS, "A certificate expires soon",
         "renew it"),
    Kind("clock.skew", "warning", "concepts/design.md#leases", "A clock differs from the one here",
         "let all machines follow NTP: logs and traces cannot be compared, and an agent that restarts "
         "with a clock set back is ignored until its lease ends"),
    # this machine
    Kind("machine.descriptors", "warning", _STREAMS, "This machine allows a process few file descriptors",
         "raise the hard limit (LimitNOFILE=, --ulimit nofile=)"),
    Kind("machine.port_taken", "warning", _PORTS, "A port that a frontend would use on this machine is taken",
         "end the program that has it, or start the frontend with another --port"),
    Kind("machine.other_fleet", "note", _WHO, "A replica of another namespace or NATS runs on this machine",
         "check --namespace and --nats if it is meant to be of this fleet"),
    # the doctor itself
    Kind("doctor.unfinished", "warning", _DOCTOR, "The time was not enough to examine everything",
         "give more --timeout-s"),
    Kind("doctor.failed", "warning", _DOCTOR, "A check of the doctor failed",
         "report this; the other checks are not affected"),
)  # fmt: skip
KINDS = {kind.code: kind for kind in _ALL}

"""Every kind of finding: how bad it is, what to do, and where the docs explain it. See docs/doctor.md."""

from __future__ import annotations

from kvrouter.observe.doctor.findings import Kind

_NATS, _WHO, _EVENTS = (
    "operations.md#nats",
    "operations.md#who-is-there",
    "engines.md#what-is-learnt-from-an-engine",
)
_AGREE, _TOKENS, _UPGRADE = "operations.md#do-the-replicas-agree", "tokens.md#comparison", "deploy.md#upgrade"
_PORTS, _READY, _READ = (
    "deploy.md#ports-rights-secrets",
    "operations.md#readiness",
    "operations.md#messages-that-cannot-be-read",
)
_BROKEN, _TLS = "operations.md#when-something-breaks", "operations.md#tls"
_OPERATORS = "operations.md#endpoints-for-operators"

_ALL = (
    # NATS
    Kind(
        "nats.unreachable",
        "error",
        "A NATS server does not answer",
        "start it, or correct --nats; look at the firewall between this machine and it",
        _NATS,
    ),
    Kind(
        "nats.not_nats",
        "error",
        "Something else answers on the port of NATS",
        "correct --nats, or end the program that took the port; restart NATS if it is NATS that hangs",
        _NATS,
    ),
    Kind(
        "nats.rejected",
        "error",
        "NATS rejects this client",
        "give the credentials that frontends use: --nats-nkey, --nats-creds, --nats-user, --nats-token-file, "
        "--nats-tls-ca",
        _NATS,
    ),
    Kind(
        "nats.denied",
        "error",
        "NATS denies a subject that is needed",
        "give the NATS user the rights of `verify` or `frontend` (kvrouter nats-accounts)",
        "deploy.md#nats",
    ),
    Kind(
        "nats.split",
        "error",
        "A NATS server does not hear processes that another one hears",
        "make the servers one cluster: `cluster { name, routes }` on each, with the same name, and "
        "open the port "
        "of the routes; or give all processes the same --nats",
        "deploy.md#nats",
    ),
    Kind(
        "nats.clusters",
        "warning",
        "The NATS servers are not of one cluster",
        "list only servers of one cluster in --nats: kvrouter reconnects to any of them",
        "deploy.md#nats",
    ),
    Kind("nats.old", "warning", "A NATS server is older than 2.10", "upgrade it", _NATS),
    Kind(
        "nats.max_payload",
        "error",
        "NATS's limit for a message is too small: snapshots and large frames are lost",
        "set `max_payload: 1MB` (at least 513 KiB) in the server's configuration",
        _NATS,
    ),
    Kind(
        "nats.slow",
        "warning",
        "NATS answers slowly: replicas decide with old load and blocks",
        "look at the load of the NATS server and at the network; place NATS near the frontends",
        "deploy.md#nats",
    ),
    Kind(
        "nats.unstable",
        "warning",
        "The connection to NATS was lost while listening",
        "look at the log of the NATS server (slow consumers, limits) and at the network",
        _NATS,
    ),
    # who is there
    Kind(
        "fleet.silent",
        "error",
        "No process of this namespace publishes on NATS",
        "check --namespace and --nats of agents and frontends: they must be those given here",
        _WHO,
    ),
    Kind(
        "fleet.no_workers",
        "error",
        "No agent publishes heartbeats",
        "start `kvrouter worker` for each engine with this --nats and --namespace, and look at the "
        "agents' logs",
        _WHO,
    ),
    Kind(
        "fleet.no_replicas",
        "warning",
        "No frontend publishes heartbeats",
        "start `kvrouter frontend` with this --nats and --namespace",
        _WHO,
    ),
    Kind(
        "fleet.unreadable",
        "warning",
        "Messages of this namespace cannot be read",
        "compare the versions of all processes; look for a program that publishes below kvrouter.NAMESPACE",
        _READ,
    ),
    Kind(
        "fleet.block_sizes",
        "warning",
        "Engines of one model have different block sizes",
        "give all engines of a model one --block-size: no overlap is predicted for the others",
        "engines.md#block-sizes",
    ),
    Kind(
        "fleet.versions",
        "note",
        "Processes have different versions of kvrouter",
        "normal during an upgrade of neighbouring versions; finish it",
        _UPGRADE,
    ),
    # agents
    Kind(
        "agent.twice",
        "error",
        "Two agents publish under one worker id",
        "stop one of them, or give each engine its own --worker-id",
        _WHO,
    ),
    Kind(
        "agent.no_card",
        "warning",
        "An agent has sent no card: replicas do not use its worker",
        "look at the agent's log (worker.failed, nats.unsent), and restart it",
        _WHO,
    ),
    Kind(
        "agent.late",
        "warning",
        "Heartbeats come irregularly: the worker may be taken as lost",
        "look at the load of the agent's machine and of NATS",
        _WHO,
    ),
    Kind(
        "agent.lost",
        "warning",
        "Replicas know a worker whose agent is silent here",
        "look whether the agent still runs and reaches NATS; its worker is dropped when its lease ends",
        _BROKEN,
    ),
    Kind(
        "replica.lost",
        "warning",
        "Replicas know a replica that is silent here",
        "look whether it still runs and reaches NATS; its bookings count until its lease ends",
        _BROKEN,
    ),
    Kind(
        "agent.no_answer",
        "error",
        "An agent does not answer requests for its blocks: replicas cannot repair what they miss",
        "restart the agent; look whether NATS lets it subscribe to kvrouter.NAMESPACE.kv-replay.ID, and "
        "publish answers",
        "deploy.md#nats",
    ),
    Kind(
        "replica.draining",
        "note",
        "A replica drains: it finishes its requests and ends",
        "nothing, if someone restarts it",
        _READY,
    ),
    Kind(
        "replica.losses",
        "note",
        "A replica has lost workers or other replicas since its start",
        "look for worker.lost and replica.lost in its log: they name who fell silent, and when",
        _WHO,
    ),
    Kind(
        "agent.partial",
        "warning",
        "An agent does not know all blocks of its engine: too little overlap is predicted",
        "start engines with a replay endpoint and before their agents; it heals when the engine "
        "restarts or has "
        "emptied its cache",
        "concepts/glossary.md#partial-ranks",
    ),
    Kind(
        "agent.shared_engine",
        "warning",
        "Several agents have announced one engine: only the worker of the last one gets requests",
        "stop all of their agents but one",
        _WHO,
    ),
    Kind(
        "agent.no_events",
        "warning",
        "An agent has no KV events: no overlap is predicted for its worker",
        "start the engine with KV events (vLLM: --kv-events-config), and its agent with --kv-events; "
        "or run the "
        "frontends with --no-use-kv-events",
        _EVENTS,
    ),
    Kind(
        "agent.other_events",
        "warning",
        "An agent reads KV events at another port than its engine reports",
        "compare --kv-events and --kv-replay of the agent with the engine's /kv_event_sources, and restart "
        "it with the engine's own; another port is right only where ports are mapped: accept that with "
        "--ignore agent.other_events",
        _EVENTS,
    ),
    Kind(
        "agent.no_prefix_caching",
        "warning",
        "An engine runs without prefix caching: no prompt is ever cached",
        "start the engine with prefix caching (vLLM: --enable-prefix-caching)",
        _EVENTS,
    ),
    Kind(
        "agent.draining",
        "note",
        "A worker drains or has no requests by order",
        "nothing, if someone takes it out of service",
        "operations.md#taking-a-worker-out-of-service",
    ),
    # engines
    Kind(
        "engine.down",
        "error",
        "An agent reports that its engine is down",
        "look at the engine's log, and start it again",
        _BROKEN,
    ),
    Kind(
        "engine.unreachable",
        "error",
        "An engine does not answer at the URL of its card",
        "start it, or correct --engine-url or --advertise-url of its agent: frontends use that URL. "
        "A loopback "
        "address works on one machine only",
        _WHO,
    ),
    Kind(
        "engine.not_found",
        "error",
        "An engine is up and answers every request with 404",
        "give its agent the URL under which the engine has /v1, with the path of a gateway (--engine-url, "
        "--advertise-url), or correct the names that the engine lists",
        "operations.md#predictions-against-the-truth",
    ),
    Kind(
        "engine.unhealthy",
        "error",
        "An engine answers, but not as a healthy one",
        "look at the engine's log",
        _BROKEN,
    ),
    Kind(
        "engine.other_model",
        "error",
        "An engine does not serve the model of its card",
        "restart its agent, or correct --engine-url: another server may have taken the port",
        _EVENTS,
    ),
    Kind(
        "engine.different",
        "error",
        "An agent publishes other blocks than its engine holds",
        "compare --kv-events and --kv-replay of the agent with the engine's /kv_event_sources; if they are "
        "right, keep the agent's log for a report, and restart the agent",
        _EVENTS,
    ),
    Kind(
        "engine.no_blocks",
        "error",
        "An engine fills blocks, and replicas know none of them",
        "compare --kv-events of the agent with the engine's endpoint (vLLM: /kv_event_sources); look "
        "at the agent's "
        "log",
        _EVENTS,
    ),
    Kind(
        "engine.capacity",
        "warning",
        "An engine has room for far fewer blocks than the others of its model",
        "start it with the settings of the others (vLLM: --gpu-memory-utilization, "
        "--num-gpu-blocks-override), and look whether another process holds memory of its GPU; nothing, if "
        "its GPU is smaller",
        "runbook.md#kvroutercapacityfell",
    ),
    Kind(
        "engine.no_blocks_known",
        "warning",
        "An engine has filled blocks since its start, and replicas know none of them",
        "normal after a reset of its prefix cache; else compare --kv-events of the agent with the engine's "
        "endpoint, and look at the agent's log",
        _EVENTS,
    ),
    Kind(
        "engine.not_asked",
        "note",
        "An engine wants a key, so it was not examined",
        "give --engine-api-key-file",
        _EVENTS,
    ),
    Kind(
        "engine.old", "warning", "An engine is too old for exact events", "upgrade it", "engines.md#versions"
    ),
    Kind(
        "engine.slow",
        "warning",
        "A worker's answers begin much later than those of the other workers of its pool",
        "look at its GPU (clocks, temperature, power: nvidia-smi -q -d PERFORMANCE), at other programs on "
        "its machine and at its network; if many requests wait there, at why they are sent there. "
        "Until then, take it out of service",
        "operations.md#taking-a-worker-out-of-service",
    ),
    Kind(
        "engine.versions",
        "note",
        "Engines of one model have different versions",
        "normal during an upgrade; templates and block names may differ between versions",
        _EVENTS,
    ),
    # events on the way
    Kind(
        "events.gaps",
        "warning",
        "Frames were lost on the way from agents or replicas to this machine",
        "look at NATS (slow consumers, its CPU) and at the network: replicas repair gaps, with delay",
        "reliability.md#what-is-promised",
    ),
    Kind(
        "events.order",
        "warning",
        "Frames came twice or out of order",
        "look for a second program that publishes under this name",
        _READ,
    ),
    Kind(
        "events.unreadable",
        "warning",
        "Frames cannot be read",
        "compare the versions of all processes",
        _READ,
    ),
    Kind(
        "events.feed_stuck",
        "warning",
        "A replica does not follow a feed",
        "look at the log of that agent or replica: it must answer requests on NATS; restart it if it "
        "does not",
        _AGREE,
    ),
    Kind(
        "events.contradictions",
        "warning",
        "A replica's copy contradicted its owner while listening",
        "look for two agents with one worker id and for foreign publishers; if there are none, report it",
        _AGREE,
    ),
    # replicas
    Kind(
        "replica.unreachable",
        "error",
        "A given replica does not answer",
        "start it, or correct the URL; it is that of the admin listener (--admin-port, --port + 100)",
        _OPERATORS,
    ),
    Kind(
        "replica.not_examined",
        "note",
        "A replica's admin listener is not reachable from here",
        "run `kvrouter doctor` on its machine, or give it --admin-host and --advertise",
        _OPERATORS,
    ),
    Kind(
        "replica.impostor",
        "error",
        "Something else answers at the address of a replica",
        "correct the URL; else another program has taken the port, or --advertise names another host",
        _PORTS,
    ),
    Kind(
        "replica.not_operators",
        "warning",
        "A replica does not show its state at this URL",
        "give the URL of its admin listener (--admin-port, by default --port + 100), and --admin-key-file if "
        "that is not on this machine's loopback",
        _OPERATORS,
    ),
    Kind(
        "replica.stranger",
        "error",
        "A given replica is not in this namespace",
        "compare --namespace and --nats of the replica with those given here",
        _WHO,
    ),
    Kind(
        "replica.shared_port",
        "warning",
        "A URL leads to several replicas, or to one that has just restarted",
        "several processes share the port: give the admin ports of each (--admin-port + 1, …)",
        "operations.md#several-processes-on-one-port",
    ),
    Kind(
        "replica.not_ready", "error", "A replica takes no requests", "its reasons say what is missing", _READY
    ),
    Kind(
        "replica.degraded",
        "warning",
        "A replica serves, but something is wrong",
        "its reasons say what",
        _READY,
    ),
    Kind(
        "replica.clients_port",
        "error",
        "The clients' port of a replica does not answer",
        "look at the replica's log and the firewall; clients get no answer there",
        _PORTS,
    ),
    Kind(
        "replica.problem",
        "warning",
        "A replica reports a problem of a worker or model",
        "the text names the remedy",
        "operations.md#predictions-against-the-truth",
    ),
    Kind(
        "replica.other_workers",
        "warning",
        "A replica does not know a worker that publishes here",
        "look at its log; its connection to NATS may be to another server or cluster",
        _AGREE,
    ),
    Kind(
        "replica.other_replicas",
        "warning",
        "A replica does not know another one: it books without its load",
        "look at its log; its connection to NATS may be to another server or cluster",
        _AGREE,
    ),
    Kind(
        "replica.alone",
        "warning",
        "Replicas do not share their bookings",
        "start all of them with --router-replica-sync",
        _AGREE,
    ),
    Kind(
        "replica.different",
        "error",
        "Replicas, or a replica and an agent, hold different blocks or bookings",
        "restart the replica that differs; keep its /workers and log for a report",
        _AGREE,
    ),
    Kind(
        "replica.not_compared",
        "note",
        "Not everything was compared",
        "repeat it with more time (--timeout-s); nothing, if the engine has no replay of it",
        _AGREE,
    ),
    Kind(
        "replica.routing",
        "warning",
        "Replicas route by different settings",
        "send POST /routing again to one replica, with reset: true if a change was refused; "
        "a replica that does not follow is of another version",
        "operations.md#changing-the-routing-of-all-replicas",
    ),
    Kind(
        "replica.tokens",
        "error",
        "A replica makes other token ids than an engine: no cached prefix is found",
        "the text names the remedy; mostly --model-path or --chat-template",
        _TOKENS,
    ),
    Kind(
        "replica.tokens_unknown",
        "note",
        "Token ids were not compared with an engine's",
        "engines need /tokenize for it; predictions are checked by what engines report, too",
        _TOKENS,
    ),
    Kind(
        "replica.prompts",
        "error",
        "Replicas make different token ids of one chat",
        "give all replicas the same --model-path, --chat-template and --tokenizer",
        _TOKENS,
    ),
    Kind(
        "replica.ways",
        "warning",
        "Replicas turn chats into token ids in different ways",
        "give all replicas the same --model-path, --tokenizer-root and --tokenizer; /workers says why a "
        "better way does not serve",
        "tokens.md#which-way-serves",
    ),
    Kind(
        "replica.descriptors",
        "warning",
        "A replica has few file descriptors left",
        "raise its limit (LimitNOFILE=, --ulimit nofile=), or start more processes",
        "operations.md#how-many-streams",
    ),
    Kind(
        "replica.admin_open",
        "warning",
        "An admin listener is open to the network, without a key",
        "update it: this version asks such peers for the key of --admin-key-file; until then set "
        "--admin-host 127.0.0.1",
        _PORTS,
    ),
    Kind(
        "tls.not_trusted",
        "warning",
        "A certificate is not accepted here",
        "give its authority: --tls-ca for replicas, --worker-tls-ca for engines",
        _TLS,
    ),
    Kind("tls.expires", "warning", "A certificate expires soon", "renew it", _TLS),
    Kind(
        "clock.skew",
        "warning",
        "A clock differs from the one here",
        "let all machines follow NTP: logs and traces cannot be compared, and an agent that restarts "
        "with a clock set "
        "back is ignored until its lease ends",
        "concepts/design.md#leases",
    ),
    # this machine
    Kind(
        "machine.descriptors",
        "warning",
        "This machine allows a process few file descriptors",
        "raise the hard limit (LimitNOFILE=, --ulimit nofile=)",
        "operations.md#how-many-streams",
    ),
    Kind(
        "machine.port_taken",
        "warning",
        "A port that a frontend would use on this machine is taken",
        "end the program that has it, or start the frontend with another --port",
        _PORTS,
    ),
    Kind(
        "machine.other_fleet",
        "note",
        "A replica of another namespace or NATS runs on this machine",
        "check --namespace and --nats if it is meant to be of this fleet",
        _WHO,
    ),
    # the doctor itself
    Kind(
        "doctor.unfinished",
        "warning",
        "The time was not enough to examine everything",
        "give more --timeout-s",
        "doctor.md",
    ),
    Kind(
        "doctor.failed",
        "warning",
        "A check of the doctor failed",
        "report this; the other checks are not affected",
        "doctor.md",
    ),
)
KINDS = {kind.code: kind for kind in _ALL}

"""Every metric, declared once: kind, labels and meaning.

/metrics takes TYPE and HELP from here; `python -m scripts.kit.reference_pages` writes the tables of
docs/metrics.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram", "summary"]

# What follows the name of a metric in the names of its samples.
_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "counter": ("",),  # the name ends in _total already
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}


class Metric(NamedTuple):
    """Names of counters end in `_total`; `labels` are without `le`."""

    kind: Kind
    labels: tuple[str, ...]
    text: str
    see: str = ""
    """The page of the documentation that has more."""


SECTIONS: dict[str, dict[str, Metric]] = {
    "Requests": {
        "kvrouter_requests_total": Metric(
            "counter",
            ("model", "route", "mode", "code", "outcome"),
            "requests that have ended. `outcome`: `ok`, `refused` (4xx, of the router or an engine), "
            "`failed` (5xx), `broken` (after the first byte) or `left` (the client left; `code` 499)",
        ),
        "kvrouter_requests_in_flight": Metric("gauge", (), "requests being served here"),
        "kvrouter_request_seconds": Metric(
            "histogram", ("model",), "from the request's arrival to the end of its answer"
        ),
        "kvrouter_inter_token_seconds": Metric(
            "histogram",
            ("model",),
            "mean time between two events of a streamed answer; one count for each answer",
        ),
        "kvrouter_first_byte_seconds": Metric(
            "histogram", ("model",), "from the request's arrival to the first byte of data, streamed requests"
        ),
        "kvrouter_step_seconds": Metric(
            "histogram",
            ("step",),
            "time of a step of a request: `tokenize` (template, tokenizer, hashing), `decide` (choice and "
            "booking; of one attempt in 16), `lookup` (in the index, a part of `decide`; of one in 16)",
        ),
        "kvrouter_tokens_total": Metric(
            "counter",
            ("model", "kind"),
            "tokens of the requests routed: `prompt` (0 where they are unknown), `overlap` (of "
            "these, predicted to be cached), `output` (as the engine reports them, else one for each event "
            "of a stream)",
        ),
        "kvrouter_tenant_tokens_total": Metric(
            "counter",
            ("tenant", "kind"),
            "with `--keys-file`: tokens of a tenant's requests, `prompt`, of these `cached` (as the engine "
            "reports, else as predicted) and `computed`, and `output`",
            see="operations.md#what-tenants-use",
        ),
        "kvrouter_spans_total": Metric(
            "counter",
            ("outcome",),
            "with traces: spans `sent`, `failed` (the collector did not take them), `dropped` (the queue "
            "was full)",
            see="tracing.md",
        ),
        "kvrouter_failed_attempts_total": Metric(
            "counter",
            ("reason",),
            "attempts that failed before their first output: by status, `lost`, `died` (the worker was lost "
            "with the request in hand), or `retried` (moved from an engine that hangs, or no longer has the "
            "model)",
        ),
        "kvrouter_migrations_total": Metric(
            "counter",
            ("cause", "result"),
            "streams that were to go on at another worker, by cause (`lost`: the connection broke, `failed`: "
            "the engine gave up, `silent`) and result (`moved`, `failed`); `request`, `refused`: those that "
            "may not",
            see="migration.md",
        ),
        "kvrouter_pd_requests_total": Metric(
            "counter",
            ("path",),
            "requests that were handed from a prefill to a decode worker (`pair`), served whole by a "
            "decode worker as that was sooner (`decode`) or hand-overs failed (`fallback`), or sent to "
            "read blocks from a peer (`pull`)",
            see="prefill-decode.md",
        ),
        "kvrouter_pd_pair_failures_total": Metric(
            "counter", (), "requests that failed at a decode worker after they were handed over"
        ),
        "kvrouter_kv_transfer_seconds": Metric(
            "histogram",
            (),
            "from the end of a prefill to the first byte of the decode worker's streamed answer",
        ),
        "kvrouter_removed_fields_total": Metric(
            "counter",
            ("field",),
            "fields and headers of clients that no engine gets: `kv_transfer_params`, "
            "`ec_transfer_params`, `bootstrap_*`, `disagg_*`, `kv_cache_report_mode`, `x-override-*`; "
            "`overrides` with `--client-overrides off`; one for each kind in a request",
        ),
        "kvrouter_token_ids_sent_total": Metric(
            "counter",
            ("model",),
            "attempts at chats that were sent with their token ids (`--send-token-ids`)",
            see="tokens.md#ids-that-are-sent",
        ),
        "kvrouter_routing_revision": Metric(
            "gauge", (), "revision of `POST /routing`; 0: as configured. Equal in all replicas"
        ),
        "kvrouter_sessions": Metric("gauge", ("pool",), "sessions bound to a target"),
        "kvrouter_circuit_open": Metric(
            "gauge",
            ("pool", "worker", "rank"),
            "1 while the target is skipped after failures (`--circuit-breaker`); else no series",
        ),
        "kvrouter_policy_troubles_total": Metric(
            "counter",
            ("where",),
            "mistakes of the class of `--router-policy`, by its method, or `answer`",
        ),
    },
    "Waiting for a worker (`--router-queue-threshold`)": {
        "kvrouter_queue_length": Metric(
            "gauge", ("pool",), "requests that wait now; no series without the flag"
        ),
        "kvrouter_queue_longest_wait_seconds": Metric(
            "gauge",
            ("pool",),
            "the longest wait so far of these",
        ),
        "kvrouter_queue_wait_seconds": Metric(
            "histogram",
            ("outcome",),
            "how long requests waited: `admitted`, `timeout` or `left`; `full`: rejected at "
            "once because too many waited",
        ),
    },
    "Tokens": {
        "kvrouter_prefix_store_characters_total": Metric(
            "counter",
            ("result",),
            "characters of long prompts: `known`, `tokenized`, or `skipped` (`--min-prefix-overlap-ratio`)",
        ),
        "kvrouter_tokenizer_checks_total": Metric(
            "counter",
            ("result",),
            "texts encoded by fastokens that the reference library encoded, too (one in 1,000): `equal`, "
            "`different` (fastokens is off from then on), or that it `failed` at",
        ),
        "kvrouter_media_prompts_total": Metric(
            "counter",
            ("outcome",),
            "chats with images or other media: `exact`, or why overlap ends before one of them",
            see="tokens.md#images",
        ),
        "kvrouter_remote_tokenizations_total": Metric(
            "counter",
            ("result",),
            "prompts sent to engines for tokenizing: `answered`, `remembered` (an equal prompt of the "
            "last minute), `refused`, `failed`, `not_asked` (too many calls in flight); with "
            "`--tokenizer auto` and `remote`",
        ),
        "kvrouter_tokenizer": Metric(
            "gauge",
            ("pool", "prompt", "way"),
            "1 for the way that serves the chats and the texts of a pool: `model path`, `card`, "
            "`engines`, `text`, `load`",
            see="tokens.md",
        ),
    },
    "Workers and load": {
        "kvrouter_workers": Metric("gauge", ("pool",), "workers known"),
        "kvrouter_target_eligible": Metric(
            "gauge",
            ("pool", "worker", "rank", "role", "kv_connector"),
            "1 if it takes requests; `role` and `kv_connector` only of prefill and decode workers",
        ),
        "kvrouter_active_blocks": Metric(
            "gauge",
            ("pool", "worker", "rank"),
            "blocks of the pool's size that requests in flight hold, of all replicas",
        ),
        "kvrouter_charged_prefill_tokens": Metric(
            "gauge", ("pool", "worker", "rank"), "prefill tokens charged and not computed yet"
        ),
        "kvrouter_target_requests": Metric(
            "gauge", ("pool", "worker", "rank"), "requests in flight there, of all replicas"
        ),
        "kvrouter_target_answers_total": Metric(
            "counter",
            ("pool", "worker", "rank", "outcome"),
            "attempts of this replica that ended, by `outcome` as in `kvrouter_requests_total`; a "
            "retry is another attempt",
        ),
        "kvrouter_target_first_byte_seconds": Metric(
            "summary",
            ("pool", "worker", "rank"),
            "from the decision to the first byte, streamed answers of this replica",
        ),
        "kvrouter_engine_requests": Metric(
            "gauge",
            ("pool", "worker", "rank", "state"),
            "requests that its engine computes (`running`) or lets wait (`waiting`), by its last heartbeat",
        ),
        "kvrouter_engine_kv_usage": Metric(
            "gauge", ("pool", "worker", "rank"), "share of the engine's KV blocks in use, 0 to 1"
        ),
        "kvrouter_target_blocks": Metric(
            "gauge", ("pool", "worker", "rank"), "blocks of its engine's size that the index has for it"
        ),
        "kvrouter_target_capacity_blocks": Metric(
            "gauge",
            ("pool", "worker", "rank"),
            "blocks of its engine's size that it can hold, over all tiers; no series if the engine does "
            "not report it",
        ),
        "kvrouter_worker_problem": Metric(
            "gauge",
            ("pool", "worker", "problem"),
            "1 while `/workers` shows this problem, else no series. `worker` is empty for a problem "
            "of the pool",
        ),
    },
    "The block index": {
        "kvrouter_index_blocks": Metric("gauge", ("pool",), "distinct blocks in the index"),
        "kvrouter_index_bytes": Metric("gauge", ("pool",), "memory of the index, about"),
        "kvrouter_index_changes_total": Metric(
            "counter",
            ("pool", "change"),
            "blocks `stored` in the index, `removed` from it, or `refused` beyond its bounds",
        ),
    },
    "Predictions against the truth": {
        "kvrouter_predictions_total": Metric(
            "counter",
            ("pool", "worker", "result", "source"),
            "predictions compared with an engine's report: `exact`, `over` or `under`; from the `index`, "
            "from requests `in_flight`, or `doubtful`: from the index, where a known reason may prove it "
            "wrong (others waited, the feed is behind, the rank is partial, the request does not read the "
            "cache)",
        ),
        "kvrouter_prediction_error_blocks": Metric(
            "histogram",
            ("pool", "worker"),
            "predicted blocks minus reported blocks; below 0 the engine had more. The exact ones are "
            '`le="0"` minus `le="-1"`. It has bounds below 0, so it has no `_sum` and no `_count`',
        ),
        "kvrouter_cached_tokens_total": Metric(
            "counter",
            ("pool", "worker", "by"),
            "prompt tokens that were cached, `predicted` by this replica and `reported` by the "
            "engine, of the requests whose engine reports them",
        ),
        "kvrouter_prediction_exact_ratio": Metric(
            "gauge",
            ("pool", "worker"),
            "share of exact predictions in the last 16 that could be judged and had blocks to find",
        ),
        "kvrouter_evidence_total": Metric(
            "counter",
            ("pool", "worker", "check", "result"),
            "answers compared with what is known here. `check` is `prompt_length`: "
            "`prompt_tokens` were the `same` as counted here, or `different`; or `announced`: "
            "the worker's events named the first block within 2 s (`found`), or not (`missing`)",
        ),
    },
    "How good the choices are": {
        "kvrouter_prefill_tokens_per_second": Metric(
            "gauge",
            ("pool",),
            "prompt tokens that a target computes in a second, as learnt from first bytes; no series while "
            "weight `auto` cannot compare seconds",
            see="concepts/decide.md",
        ),
        "kvrouter_uncached_tokens_total": Metric(
            "counter",
            ("pool", "cache"),
            "prompt tokens of the requests routed here, each request once, that a cache did not"
            " have: `chosen` target (predicted), the target with the `best` overlap, one "
            "`pooled` cache of the fleet's size, one `endless` cache; `none` counts all prompt "
            "tokens. The share that was cached is 1 − this / that of `none`. `pooled` and "
            "`endless` are estimated from a sample of all replicas' requests",
        ),
        "kvrouter_ttft_later_seconds": Metric(
            "summary",
            ("pool",),
            "how much later than the earliest target the chosen one was predicted to be, of the"
            " decisions that compared predicted times to first token. Only weight `auto` does, "
            "and custom policies while these are known (`kvrouter_prefill_tokens_per_second`)",
        ),
        "kvrouter_ttft_seconds": Metric(
            "summary",
            ("pool", "time", "up_to_s"),
            "times to first token, `predicted` and `measured` (from the decision to the first "
            "byte), of the decisions of `kvrouter_ttft_later_seconds` whose first byte was "
            "measured, by predicted time: more than the next lower bound, at most `up_to_s` "
            "(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, +Inf). Unlike buckets of a histogram, not"
            " cumulative. Answers that are not streamed, or have no first byte, are not counted",
        ),
    },
    "Replicas and feeds": {
        "kvrouter_replicas": Metric("gauge", (), "replicas known, this one included"),
        "kvrouter_bookings": Metric(
            "gauge",
            ("pool", "router"),
            "requests in flight, by replica; 0 for a known replica without bookings",
        ),
        "kvrouter_feed_live": Metric("gauge", ("feed",), "1 if the copy of this source is in step"),
        "kvrouter_feed_staleness_seconds": Metric(
            "gauge", ("feed",), "time since the last message of the source; no series before the first one"
        ),
        "kvrouter_feed_events_total": Metric(
            "counter",
            ("feed", "event"),
            "what happened: `applied`, `repeated`, `stale`, `gaps`, `malformed`, `unknown_ops`, "
            "`replayed`, `snapshots`, `contradictions`, `digest_mismatches`, `unsent`, "
            "`other_versions`, `held_overflows`, `failures`",
            see="concepts/glossary.md#states",
        ),
        "kvrouter_replica_events_total": Metric(
            "counter",
            ("event",),
            "`workers_lost` and `replicas_lost` (dropped because they were silent past their lease); "
            "messages that were ignored: `malformed_heartbeats`, `stale_heartbeats` (of a former agent of "
            "a worker, after its restart), `unknown_messages` (no known subject, or KV frames of a worker "
            "whose card is missing), `pools_refused` (about a pool beyond the maximum), "
            "`members_refused` (heartbeats of a worker or replica beyond the maximum)",
        ),
    },
    "The bus": {
        "kvrouter_nats_connected": Metric(
            "gauge",
            (),
            "1 while NATS answers; of agents, too",
        ),
        "kvrouter_bus_messages_total": Metric(
            "counter",
            ("event",),
            "messages `published`, `received`, `unsent` (NATS was away, or the buffer full), "
            "`dropped` (this replica was slow; feeds repair themselves), or `failed` (raised an"
            " error here: a bug of kvrouter)",
        ),
        "kvrouter_bus_bytes_total": Metric(
            "counter",
            ("event",),
            "payload of the messages `published` and `received`",
        ),
        "kvrouter_inbox_age_seconds": Metric(
            "gauge", (), "age of the oldest message that is not applied yet"
        ),
    },
    "The process": {
        "kvrouter_build_info": Metric(
            "gauge",
            ("version", "core", "python"),
            "1, of the version that runs; `core` is `native` or `python`",
        ),
        "kvrouter_process_scraped": Metric(
            "gauge",
            ("process",),
            "only in answers for several processes: 1 if the process answered within 4 s; else its "
            "samples are missing",
        ),
        "kvrouter_config_info": Metric(
            "gauge",
            ("hash",),
            "1, of the settings in use. Replicas with equal settings have equal hashes; addresses, "
            "ports and secrets are left out",
        ),
    },
    "The event loop": {
        "kvrouter_loop_lag_seconds": Metric(
            "histogram", (), "how long a callback that was ready had to wait, sampled 50 times a second"
        ),
        "kvrouter_loop_lag_longest_seconds": Metric(
            "gauge", (), "the longest wait of a callback that was ready, in the last minute"
        ),
        "kvrouter_gc_longest_seconds": Metric(
            "gauge", (), "longest pause by Python's garbage collector in the last minute"
        ),
    },
    "Agents": {
        "kvrouter_agent_state": Metric(
            "gauge",
            ("worker", "state"),
            "1 for the state that the agent announces: `up`, `draining`, or `down` (the engine "
            "sleeps, or does not answer its health probes)",
        ),
        "kvrouter_agent_blocks": Metric(
            "gauge", ("worker", "rank"), "blocks on the device that are published"
        ),
        "kvrouter_agent_rank_partial": Metric(
            "gauge", ("worker", "rank"), "1 while the engine may hold blocks that are not published"
        ),
    },
}
"""By heading of docs/metrics.md, in its order."""

METRICS: dict[str, Metric] = {name: one for section in SECTIONS.values() for name, one in section.items()}

METRIC_OF: dict[str, str] = {
    f"{name}{suffix}": name for name, one in METRICS.items() for suffix in _SUFFIXES[one.kind]
}
"""The metric of each sample, both by name."""

"""The flags of the admission queue (frontend/admission_queue.py). It is off by default."""

from __future__ import annotations

import argparse

from kvrouter.config import not_negative, positive, positive_int
from kvrouter.core.routing.admission import AdmissionSettings

FIFO, PRIORITY = "fifo", "priority"
_DEFAULTS = AdmissionSettings()


def add_queue_flags(group: argparse._ArgumentGroup) -> None:
    add, default = group.add_argument, _DEFAULTS
    add(
        "--router-queue-threshold",
        type=not_negative,
        default=default.threshold,
        help="requests wait while every worker has more prefill tokens charged than this many times its "
        "max_batched_tokens; 0: requests never wait",
    )
    add(
        "--router-queue-policy",
        choices=(FIFO, PRIORITY),
        default=FIFO,
        help="priority: by the header x-kvrouter-priority or `priority` in the body, lower first as in vLLM",
    )
    add(
        "--router-queue-ageing-s",
        type=positive,
        default=default.ageing_s,
        help="seconds of waiting that count as much as one step of priority",
    )
    add(
        "--router-queue-timeout",
        type=positive,
        default=default.max_wait_s,
        help="seconds that a request waits; then it gets a 503",
    )
    add(
        "--router-queue-size",
        type=positive_int,
        default=default.max_waiting,
        help="most requests that wait per model; one more gets a 503",
    )


def admission_settings(flags: argparse.Namespace) -> AdmissionSettings:
    return AdmissionSettings(
        threshold=flags.router_queue_threshold,
        max_waiting=flags.router_queue_size,
        max_wait_s=flags.router_queue_timeout,
        # 0: all priorities are equal, so requests are served in the order of their arrival
        ageing_s=flags.router_queue_ageing_s if flags.router_queue_policy == PRIORITY else 0.0,
    )

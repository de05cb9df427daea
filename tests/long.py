"""The long form of the tests, KVROUTER_TEST_LONG=1: all examples, and the tests that take minutes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

IS_LONG = bool(os.environ.get("KVROUTER_TEST_LONG"))


def examples(count: int, short: int = 0, **more: Any) -> settings:
    """`count` examples in the long form, others in each run; else `short`, or a tenth, always the same."""
    return settings(max_examples=count if IS_LONG else short or max(10, count // 10), **more)


def needs_long(why: str) -> pytest.MarkDecorator:
    """Skips a test in the short form; `why`, as in "half a minute"."""
    return pytest.mark.skipif(not IS_LONG, reason=f"{why}: KVROUTER_TEST_LONG=1")

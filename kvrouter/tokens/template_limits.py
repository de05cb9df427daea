"""The sandbox in which chat templates are rendered, with limits on their time and memory.

A template file comes from the same source as its model, often a third party, and runs inside the replica.
jinja2's sandbox prevents access to the system. This one also limits work: each iteration of a loop, call,
filter and piece of text is charged to the rendering's budget, and an operation that would make one huge value
is rejected before it runs.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kvrouter.errors import KvRouterError

# Budget of one rendering, about one second: iterations, calls, texts, items passed to filters.
MOST_STEPS = 200_000
# Limit of characters in one text and of items in one list.
MOST_CHARACTERS = 16 * 1024 * 1024
_CHARACTERS_A_STEP = 1024
_ITEMS_A_STEP = 64
_STEPS_A_CALL = 4
# A bit of a number counts as this many characters: long numbers are slow to multiply and to print.
_BIT_COST = 64
# A large or variable width in a format string, such as "%10000000d" or "%*d".
_WIDE = re.compile(r"\d{7,}|\*")
# Filters and string methods whose result is as large as their numeric argument.
_PADDING = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "tojson"}
)


class TemplateLimitError(KvRouterError):
    """A rendering took too many steps, or would have made too large a value."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with a budget. Call `begin` before each rendering, in the thread that renders."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **settings: Any) -> None:
        self._budget = threading.local()
        super().__init__(finalize=self._printed, **settings)
        for name, filter_ in list(self.filters.items()):
            self.add_filter(name, filter_)
        self.filters |= {"_turns": self._turns, "_joined": self._joined}

    def begin(self) -> None:
        """Reset the budget of this thread."""
        self._budget.left = MOST_STEPS

    def add_filter(self, name: str, filter_: Callable[..., Any]) -> None:
        """Add or replace a filter."""
        self.filters[name] = self._counting(name, filter_)

    def limited(self, text: str) -> jinja2.Template:
        """The compiled template. Raises jinja2.TemplateError."""
        return self.from_string(_Counted().visit(self.parse(text)))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call in a template, of a method, a macro or a global."""
        __self._take(_STEPS_A_CALL)
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(text, str):
            __self._check(__obj.__name__, text, args)
        return __self._charged(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator in a template."""
        if operator in {"*", "**"}:
            _check_product(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check_size(len(left) + len(right))
            self._take(len(left) // _ITEMS_A_STEP)
        return self._charged(super().call_binop(context, operator, left, right))

    def _take(self, steps: int) -> None:
        left = self._budget.left = getattr(self._budget, "left", MOST_STEPS) - steps
        if left < 0:
            raise TemplateLimitError(f"the chat template takes more than {MOST_STEPS:,} steps")

    def _charged(self, value: Any) -> Any:
        """Charge for a value that the template makes or prints."""
        if isinstance(value, str):
            self._take(1 + len(value) // _CHARACTERS_A_STEP)
        return value

    def _printed(self, value: Any) -> Any:
        self._take(1)
        return self._charged(value)

    def _turns(self, items: Iterable[Any]) -> Iterable[Any]:
        """Charge for the items of a loop."""
        if not isinstance(items, Sized):
            return self._one_by_one(items)
        self._take(len(items))
        return items

    def _one_by_one(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._take(1)
            yield item

    def _joined(self, *parts: Any) -> Any:
        """`a ~ b`."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return self._charged("".join(texts))

    def _counting(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
        """The filter with charges for its argument and its result."""

        @functools.wraps(filter_)  # it copies the mark by which jinja2 passes the context or environment
        def counting(*args: Any, **kwargs: Any) -> Any:
            value = next((one for one in args if isinstance(one, str | list | tuple | dict | range)), "")
            self._take(1 + (len(value) // _CHARACTERS_A_STEP if isinstance(value, str) else len(value)))
            self._check(name, value if isinstance(value, str) else "", (*args, *kwargs.values()))
            return self._charged(filter_(*args, **kwargs))

        return counting

    def _check(self, name: str, text: str, args: Iterable[Any]) -> None:
        """Raise before a filter or string method makes a huge value."""
        if name in _PADDING:
            _check_size(max((abs(one) for one in args if isinstance(one, int)), default=0))
        elif name.startswith("format"):
            _check_format(text)
        elif name in {"replace", "join"}:
            sizes = [len(one) for one in args if isinstance(one, Sized)]
            _check_size(max(1, len(text)) * max(sizes, default=0))


class _Counted(NodeTransformer):
    """Rewrites loops and `~` to use the environment's counting filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_turns", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        first, *others = node.nodes
        return nodes.Filter(first, "_joined", others, [], None, None, lineno=node.lineno)


def _check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        _check_size(bits * _BIT_COST)
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(value, str | list | tuple):
            _check_size(len(value) * times)


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise TemplateLimitError("the chat template formats with a width that is too large")


def _check_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise TemplateLimitError(f"the chat template makes a text or list of {size:,} characters or items")

"""Compares the token ids computed by kvrouter for many request bodies with those of a live engine.

The engine's ids come from /tokenize (used by --tokenizer remote and by the comparison at start-up), and
where possible from the completion itself with `return_token_ids`: the ids that the engine computes.

    python -m scripts.kit.compare_tokens --engine http://127.0.0.1:8000 --model NAME --model-path DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from kvrouter.bodies.openai import CompletionRequest, parse_chat, parse_completion
from kvrouter.errors import BadRequestError
from kvrouter.tokens.id_comparison import find_difference
from kvrouter.tokens.prefix_tokens import CacheSettings
from kvrouter.tokens.prompt import PromptEncoder, TokenPrompt
from kvrouter.tokens.remote_tokenizer import EngineTokenizer, EngineTokenizerError

Body = dict[str, Any]

_TEXTS = (
    "Hello",
    "  two spaces,\ttab\n\nand lines\r\n",
    "caf\u00e9 cafe\u0301 \u4f60\u597d \U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "numbers 1 22 333 4444 1,000.5e-3 \uff12\uff13",
    "don't I'll WE'VE she's",
    "<|im_start|>system\ninjected<|im_end|> and <|endoftext|>",
    "<b>not html</b> & 'quotes' \"double\" \\ / {{ jinja }} {% raw %}",
    "x" * 700,
    "word " * 400,
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31",
    " ",
    "\u00a0\u2028\u200b\ufeff",
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a town \u2014 \u00e9",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bern"}'}}


def _user(content: Any) -> Body:
    return {"role": "user", "content": content}


def bodies() -> Iterator[tuple[str, Body]]:
    """`(kind, body)`: chats have messages, completions a prompt."""
    for text in _TEXTS:
        yield "text", {"prompt": text}
        yield "text, no special tokens", {"prompt": text, "add_special_tokens": False}
        yield "chat", {"messages": [_user(text)]}
        yield "chat, system", {"messages": [{"role": "system", "content": text}, _user("go")]}
    yield "list of texts", {"prompt": list(_TEXTS[:5])}
    yield "ids", {"prompt": [5, 6, 7, 8]}
    yield "lists of ids", {"prompt": [[5, 6, 7], [8, 9]]}
    yield from _truncated()
    yield from _shaped()
    yield from _conversations()
    yield from _odd_fields()


def _truncated() -> Iterator[tuple[str, Body]]:
    for count in (1, 5, 100_000 // 50, -1):
        yield "truncated", {"prompt": _TEXTS[8], "truncate_prompt_tokens": count}
        yield "truncated chat", {"messages": [_user(_TEXTS[8])], "truncate_prompt_tokens": count}


def _shaped() -> Iterator[tuple[str, Body]]:
    turns = [_user("one"), {"role": "assistant", "content": "two, and"}]
    yield "no generation prompt", {"messages": turns, "add_generation_prompt": False}
    yield (
        "continue_final_message",
        {"messages": turns, "add_generation_prompt": False, "continue_final_message": True},
    )
    for text in ("ends in a space ", "ends in a line\n", " starts so", "<|im_end|>"):
        final = [_user("one"), {"role": "assistant", "content": text}]
        body = {"messages": final, "add_generation_prompt": False, "continue_final_message": True}
        yield "continue_final_message", body
    yield "add_special_tokens", {"messages": turns, "add_special_tokens": True}
    for variables in ({"enable_thinking": False}, {"tools": None}, {"x": [1, {"y": "z"}]}):
        yield "chat_template_kwargs", {"messages": turns, "chat_template_kwargs": variables}
    for effort in ("none", "low", "high"):
        yield "reasoning_effort", {"messages": turns, "reasoning_effort": effort}


def _conversations() -> Iterator[tuple[str, Body]]:
    parts = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    yield "content parts", {"messages": [_user(parts)]}
    yield "content parts", {"messages": [_user([{"type": "text", "text": ""}, *parts])]}
    yield "content parts", {"messages": [{"role": "system", "content": parts}, _user(parts)]}
    yield "content parts", {"messages": [_user(["plain", "strings"])]}
    yield "developer", {"messages": [{"role": "developer", "content": "rules"}, _user("go")]}
    several = [{"role": "system", "content": "a"}, _user("b"), {"role": "developer", "content": "c"}]
    yield "developer", {"messages": [*several, _user("d")]}
    called = [_user("weather?"), {"role": "assistant", "content": None, "tool_calls": [_CALL]}]
    answered = [*called, {"role": "tool", "tool_call_id": "c1", "content": "sunny \u2600"}]
    for messages in ([_user("hi")], called, answered):
        yield "tools", {"messages": messages, "tools": [_TOOL]}
        yield "tools, tool_choice none", {"messages": messages, "tools": [_TOOL], "tool_choice": "none"}
        yield "tool calls without tools", {"messages": messages}
    bare = {"type": "function", "function": {"name": "f"}}
    strict = {"type": "function", "function": {**_TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    yield "tools", {"messages": [_user("hi")], "tools": [bare, strict]}
    empty = {**_CALL, "function": {"name": "f", "arguments": ""}}
    yield "tools", {"messages": [_user("hi"), {"role": "assistant", "tool_calls": [empty]}, _user("so?")]}
    listed = [_user("x"), {"role": "assistant", "content": [{"type": "text", "text": "y"}]}, _user("z")]
    yield "assistant parts", {"messages": listed}
    reasoned = [_user("x"), {"role": "assistant", "content": "y", "reasoning": "because"}, _user("z")]
    yield "reasoning", {"messages": reasoned}
    long = [message for number in range(20) for message in (_user(f"turn {number} " * 30), listed[1])]
    yield "many turns", {"messages": [*long, _user("the end")]}


def _odd_fields() -> Iterator[tuple[str, Body]]:
    yield "name", {"messages": [{**_user("hi"), "name": "Ann"}]}
    yield "unknown fields", {"messages": [{**_user("hi"), "mood": "good"}], "colour": 1}
    yield "documents", {"messages": [_user("hi")], "documents": [{"title": "t", "text": "u"}]}
    yield "cache_salt", {"messages": [_user("hi")], "cache_salt": "s"}
    yield "unicode escapes", {"messages": [_user("\x00\x7f\x1b[0m")]}
    yield "empty content", {"messages": [_user(""), {"role": "assistant", "content": ""}, _user("x")]}
    yield "unknown role", {"messages": [{"role": "narrator", "content": "once"}, _user("x")]}


@dataclass
class Tally:
    """The comparison's result for each source of ids: equal, different, or rejected.

    A body that only the engine rejects is not a fault: it is relayed, and the engine answers with the error.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def note(self, way: str, result: str, detail: str = "") -> None:
        """One comparison."""
        self.counts[way, result] += 1
        if result in {"different", "only kvrouter rejects"}:
            self.faults.append(f"{way}: {result}: {detail}")


class Comparison:
    """One engine, one model directory."""

    def __init__(self, url: str, model: str, encoder: PromptEncoder, tally: Tally) -> None:
        self.url, self.model, self.encoder, self.tally = url, model, encoder, tally

    async def compare(
        self, engines: EngineTokenizer, http: aiohttp.ClientSession, kind: str, body: Body
    ) -> None:
        """Compare one body with each source of ids."""
        whole = {"model": self.model, **body}
        raw = json.dumps(whole).encode()
        try:
            request: CompletionRequest = (parse_chat if "messages" in body else parse_completion)(raw)
            ids = await self.encoder.encode(request.prompt)
        except BadRequestError as error:
            request, ids, detail = CompletionRequest(None, False, None, None, None, 1), None, str(error)
        else:
            detail = ""
        await self._generated(http, kind, whole, ids, detail)
        prompt = request.prompt
        if prompt is None or ids is None or isinstance(prompt, TokenPrompt):
            return
        try:
            theirs = await engines.tokenize(self.url, self.model, prompt)
        except EngineTokenizerError as error:
            self.tally.note("/tokenize", "unanswered", f"{kind}: {error} {json.dumps(body)[:300]}")
            return
        self._note("/tokenize", kind, body, ids, theirs)

    async def _generated(
        self, http: aiohttp.ClientSession, kind: str, body: Body, ids: list[list[int]] | None, detail: str
    ) -> None:
        is_chat = "messages" in body
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        asked = {**body, "max_tokens": 1, "return_token_ids": True}
        async with http.post(self.url + path, json=asked) as response:
            answer = await response.json()
        if response.status != 200:
            result = "both refuse" if ids is None else "engine refuses"
            self.tally.note("completion", result, f"{kind}: {answer} {json.dumps(body)[:300]}")
            return
        if ids is None:
            self.tally.note(
                "completion", "only kvrouter rejects", f"{kind}: {detail} {json.dumps(body)[:300]}"
            )
            return
        if is_chat:
            theirs = [answer["prompt_token_ids"]]
        else:
            theirs = [choice["prompt_token_ids"] for choice in answer["choices"]]
        self._note("completion", kind, body, ids, theirs)

    def _note(
        self, way: str, kind: str, body: Body, ids: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
    ) -> None:
        for ours, engine in zip(ids, theirs, strict=True):
            found = find_difference(ours, engine, self.encoder.decode, is_chat="messages" in body)
            detail = f"{kind}: {found} {json.dumps(body)[:300]}"
            self.tally.note(way, "equal" if found is None else "different", detail)


async def _run(flags: argparse.Namespace) -> int:
    tally = Tally()
    every = list(bodies())
    cache, template = CacheSettings(), flags.chat_template
    with PromptEncoder.load(flags.model_path, cache=cache, chat_template=template) as encoder:
        comparison = Comparison(flags.engine.rstrip("/"), flags.model, encoder, tally)
        async with EngineTokenizer.open() as engines, aiohttp.ClientSession() as http:
            for _ in range(2):  # the second time the prefix-token cache has the beginnings
                for kind, body in every:
                    await comparison.compare(engines, http, kind, body)
    print(f"{len(every)} bodies of {len({kind for kind, _ in every})} kinds, each twice")
    for (way, result), count in sorted(tally.counts.items()):
        print(f"  {way:12} {result:16} {count}")
    for fault in dict.fromkeys(tally.faults):
        print(f"  {fault}")
    return 1 if tally.faults else 0


def main() -> int:
    """Return 1 if any ids differ."""
    parser = argparse.ArgumentParser(prog="python -m scripts.kit.compare_tokens", description=__doc__)
    parser.add_argument("--engine", required=True, metavar="URL")
    parser.add_argument("--model", required=True, metavar="NAME")
    parser.add_argument("--model-path", required=True, type=Path, metavar="DIR")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="the engine's chat template")
    return uvloop.run(_run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())

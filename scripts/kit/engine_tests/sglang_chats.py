"""Records the prompts that SGLang's own code makes of recorded bodies, with several chat templates.

    DIR/sglang/bin/python scripts/kit/engine_tests/sglang_chats.py RECORDED FILE
    … sglang_chats.py RECORDED FILE --random 2000 --seed 7     chats mixed at random of those

with the Python of an environment that has SGLang, which needs no engine and no GPU for this. Bodies and
templates come from RECORDED (tests/data/sglang_chats_0.5.23.json): a new body is added there first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Json = dict[str, Any]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def random_chat(rng: random.Random, chats: list[Json]) -> Json:
    """Messages of any recorded chats, with other roles and fields, and fields of other chats."""
    messages = [message for chat in chats for message in chat["messages"]]
    body: Json = {"messages": []}
    for _ in range(rng.randint(1, 5)):
        made, other = dict(rng.choice(messages)), rng.choice(messages)
        for name in made.keys() | other.keys():
            if name in other and rng.random() < 0.15:
                made[name] = other[name]
        body["messages"].append(made)
    for name in sorted({name for chat in chats for name in chat} - {"messages"}):
        if rng.random() < 0.25:
            body[name] = rng.choice([chat[name] for chat in chats if name in chat])
    return body


class Defaults(SimpleNamespace):
    """SGLang's settings: all are off except the given ones."""

    def __getattr__(self, _name: str) -> None:
        return None


class Recorder:
    """SGLang's servings of one template, with one token for each character."""

    def __init__(self, template: str) -> None:
        from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
        from sglang.srt.entrypoints.openai import serving_base, serving_chat, serving_responses
        from sglang.srt.parser.template_manager import TemplateManager
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        class Characters(PreTrainedTokenizerFast):  # type: ignore[misc]
            def encode(self, text: str, **_options: object) -> list[int]:
                return [*map(ord, text)]

            def decode(self, ids: list[int], **_options: object) -> str:
                return "".join(map(chr, ids))

        settings = Defaults(disaggregation_mode="null")
        for module in (serving_base, serving_chat, serving_responses):
            for name in ("get_serving", "get_model", "get_disagg", "get_observability"):
                if hasattr(module, name):
                    setattr(module, name, lambda: settings)
        tokenizer = Characters(tokenizer_object=Tokenizer(WordLevel({}, unk_token="?")), bos_token="<s>")
        tokenizer.chat_template = template
        about = SimpleNamespace(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
        config = SimpleNamespace(
            hf_config=about, is_multimodal=False, get_default_sampling_params=dict, context_len=4096
        )
        manager = SimpleNamespace(
            tokenizer=tokenizer,
            processor=None,
            model_config=config,
            model_path="m",
            served_model_name="m",
            server_args=None,
            config_value=lambda _name: None,
        )
        templates = TemplateManager()
        templates._python_chat_template = None
        templates._jinja_template_content_format = _content_format(template)
        templates._run_template_detection(template, tokenizer)
        self._chat = serving_chat.OpenAIServingChat(manager, templates)
        self._messages = AnthropicServing(self._chat)
        self._responses = serving_responses.OpenAIServingResponses(manager, templates)
        self._tokenizer = tokenizer

    def prompt(self, path: str, body: Json) -> str | None:
        """The prompt; None if SGLang rejects the body."""
        copied = json.loads(json.dumps(body)) | {"model": "m"}
        made = {CHAT: self._of_chat, MESSAGES: self._of_messages, RESPONSES: self._of_responses}
        try:
            return self._tokenizer.decode(made[path](copied))
        except ValueError:  # pydantic's errors too
            return None

    def _of_chat(self, body: Json) -> list[int]:
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        return self._ids(ChatCompletionRequest(**body))

    def _of_messages(self, body: Json) -> list[int]:
        from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest

        request = AnthropicMessagesRequest(max_tokens=9, **body)
        return self._ids(self._messages._convert_to_chat_completion_request(request))

    def _ids(self, request: Any) -> list[int]:
        if reason := self._chat._validate_request(request):
            raise ValueError(reason)
        made, _ = self._chat._convert_to_internal_request(request)
        return made.input_ids  # type: ignore[no-any-return]

    def _of_responses(self, body: Json) -> list[int]:
        from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

        made = self._responses._make_request(ResponsesRequest(**body), None, self._tokenizer)
        return asyncio.run(made)[2][0]  # type: ignore[no-any-return]


def _content_format(template: str) -> Any:
    from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format

    return detect_jinja_template_content_format(template)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recorded", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    recorded, rng = json.loads(options.recorded.read_text("utf-8")), random.Random(options.seed)
    templates, bodies = recorded["templates"], [(case["path"], case["body"]) for case in recorded["cases"]]
    if options.random:
        chats = [body for path, body in bodies if path == CHAT]
        bodies = [(CHAT, random_chat(rng, chats)) for _ in range(options.random)]
    recorders = {name: Recorder(text) for name, text in templates.items()}
    cases = [
        {
            "path": path,
            "body": body,
            "prompts": {name: each.prompt(path, body) for name, each in recorders.items()},
        }
        for path, body in bodies
    ]
    about = {"engine": "sglang", "version": version("sglang"), "licence": "Apache-2.0"}
    found = {**about, "templates": templates, "special_tokens": {"bos_token": "<s>"}, "cases": cases}
    options.file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

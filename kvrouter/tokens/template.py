"""The model's chat template, rendered in the same way as by transformers and the engine (dialects.py)."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self, TypeAlias

import jinja2
import jinja2.ext
import jinja2.parser
import msgspec
from jinja2 import nodes

from kvrouter.errors import BadRequestError, ConfigError
from kvrouter.tokens.dialects import Asked, Dialect, Sglang, Vllm
from kvrouter.tokens.messages import Message
from kvrouter.tokens.template_limits import LimitedEnvironment, TemplateLimitError

# Limit of a template file. The longest known ones have 30 KB; compiling one of 2 MB takes 20 s.
MOST_TEMPLATE_BYTES = 256 * 1024
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MOST_TEMPLATE_BYTES)]
# `output_config.effort` of /v1/messages.
EFFORTS = ("low", "medium", "high", "xhigh", "max")


class _Named(msgspec.Struct):
    """One of several templates in a JSON file."""

    name: str
    template: _Text


_Stated: TypeAlias = _Text | list[_Named]


class ChatTemplate:
    """A model's chat templates: the default one, and optionally another for requests with tools."""

    def __init__(
        self, text: str, *, tool_use: str | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        environment, tokens = _environment(), dict(special_tokens or {})
        default = _Compiled(environment, text)
        for_tools = _Compiled(environment, tool_use) if tool_use is not None else None
        self.dialects: Sequence[Dialect] = (
            Vllm(default, for_tools, tokens),
            Vllm(default, for_tools, tokens, follows_namespaces=False),
            Sglang(default, tokens),
        )
        self.dialect: Dialect = self.dialects[0]
        """How the engine prints chats."""

    @classmethod
    def load(cls, model_path: Path, file: Path | None = None) -> Self | None:
        """The template in a model directory, or None. Raises ConfigError if it does not compile.

        Read from `chat_template.jinja` and `additional_chat_templates/`, else from `tokenizer_config.json`,
        else from `chat_template.json`, as in older multimodal models. `file` replaces all of them, like
        vLLM's --chat-template.
        """
        config = _read_json(model_path / "tokenizer_config.json")
        texts = {"default": _read_text(file)} if file else _template_texts(model_path, config)
        if "default" not in texts:
            return None
        special_tokens = _special_tokens(_read_json(model_path / "special_tokens_map.json") | config)
        try:
            return cls(texts["default"], tool_use=texts.get("tool_use"), special_tokens=special_tokens)
        except Exception as error:  # jinja2's errors, and Python's own such as RecursionError
            raise ConfigError(
                f"the chat template of {file or model_path} does not compile: {error}"
            ) from error

    def printed_by(self, dialect: Dialect) -> Self:
        """The same templates in this dialect."""
        other = copy.copy(self)
        other.dialect = dialect
        return other

    @functools.cached_property
    def can_skip_thinking(self) -> bool:
        """Whether the effort "none" renders, and other than every effort: else vLLM asks for "low"."""
        none = self._rendered_with("none")
        return none is not None and all(self._rendered_with(effort) != none for effort in EFFORTS)

    def _rendered_with(self, effort: str) -> str | None:
        variables = {"enable_thinking": effort != "none", "reasoning_effort": effort}
        try:
            return self.render([{"role": "user", "content": "Hi"}], chat_template_kwargs=variables)
        except (BadRequestError, TemplateLimitError):
            return None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        names_first: bool = False,
    ) -> str:
        """The prompt. `names_first`: see `messages.conversation`.

        Raises BadRequestError if the messages are malformed or the template rejects them, and
        TemplateLimitError if it exceeds its budget.
        """
        asked = Asked(
            messages,
            tools,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs or {},
            names_first,
        )
        return self.dialect.render(asked)


class _Compiled:
    def __init__(self, environment: LimitedEnvironment, text: str) -> None:
        self.text = text
        self.tree = environment.parse(text)
        self._environment = environment
        self._template = environment.limited(text)

    def render(self, chat: list[Message], variables: Mapping[str, Any]) -> str:
        self._environment.begin()
        try:
            return self._template.render({**variables, "messages": chat})
        except TemplateLimitError:
            raise
        except Exception as error:  # raise_exception(), and TypeError or any other error in the template
            reason = f"the chat template rejects this request: {error}"
            raise BadRequestError(reason, param="messages") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here only its body is printed."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces jinja2's filter, which escapes HTML and sorts keys: models were trained on neither."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time, as vLLM does


def _template_texts(model_path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Text of each template by name; a single template is named "default"."""
    more = (model_path / "additional_chat_templates").glob("*.jinja")
    texts = {file.stem: _read_text(file) for file in more}
    if (file := model_path / "chat_template.jinja").is_file():
        texts["default"] = _read_text(file)
    if texts:
        return texts
    stated = config.get("chat_template") or _read_json(model_path / "chat_template.json").get("chat_template")
    try:
        found = msgspec.convert(stated or [], _Stated)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the chat_template in a JSON file of {model_path}: {error}") from None
    return {"default": found} if isinstance(found, str) else {named.name: named.template for named in found}


def _read_text(file: Path) -> str:
    try:
        if file.stat().st_size > MOST_TEMPLATE_BYTES:
            raise ConfigError(f"the chat template {file} is larger than {MOST_TEMPLATE_BYTES} bytes")
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the chat template {file} cannot be read: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on: each a string, or an object with the string as its `content`."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; empty if the file does not exist. Raises ConfigError for anything else."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return value

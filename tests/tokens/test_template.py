from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrouter.errors import BadRequestError, ConfigError
from kvrouter.tokens.messages import Message
from kvrouter.tokens.template import ChatTemplate

HELLO: list[Message] = [{"role": "system", "content": "Be nice."}, {"role": "user", "content": "Hello <3"}]
WEATHER = {"type": "function", "function": {"name": "weather", "description": "é", "parameters": {}}}

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
VISION = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}[{{ p.text }}]{% endfor %} {% endfor %}"


def template(path: Path, text: str | None = None, **config: Any) -> ChatTemplate:
    """The template of a model directory with this chat_template.jinja and tokenizer_config.json."""
    if text is not None:
        (path / "chat_template.jinja").write_text(text)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatTemplate.load(path)
    assert found
    return found


def test_chatml() -> None:
    """The common template, with a generation prompt and without."""
    prompt = "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\nHello <3<|im_end|>\n"

    assert prompt + "<|im_start|>assistant\n" == ChatTemplate(CHATML).render(HELLO)
    assert prompt == ChatTemplate(CHATML).render(HELLO, add_generation_prompt=False)


def test_special_tokens(tmp_path: Path) -> None:
    """Special tokens are variables, whether the config has them as strings or as objects."""
    llama = template(tmp_path, LLAMA_2, bos_token={"content": "<s>"}, eos_token="</s>", add_bos_token=True)

    prompt = llama.render([{"role": "user", "content": " a "}, {"role": "assistant", "content": "b"}])

    assert "<s>[INST] a [/INST] b </s>" == prompt


def test_older_file_of_special_tokens(tmp_path: Path) -> None:
    """special_tokens_map.json is read, too, and the tokenizer's config wins."""
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<old>", "eos_token": "<eos>"}')

    found = template(
        tmp_path, "{{ bos_token }}{{ eos_token }}{{ pad_token }}", bos_token="<bos>", pad_token=None
    )

    assert "<bos><eos>" == found.render(HELLO)


def test_the_template_raises(tmp_path: Path) -> None:
    """The message of a template's raise_exception reaches the client as a 400."""
    with pytest.raises(BadRequestError, match="Only user and assistant roles are supported!") as caught:
        ChatTemplate(LLAMA_2).render(HELLO)
    assert "messages" == caught.value.param


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages.append(1) }}",
        "{{ range(10**9) }}",
    ],
)
def test_the_template_fails(text: str) -> None:
    """Any other error in a template, including one of the sandbox, is a 400 and not a 500."""
    with pytest.raises(BadRequestError, match="the chat template rejects this request"):
        ChatTemplate(text).render(HELLO)


def test_parts_are_joined_for_a_plain_template() -> None:
    """A template that prints content gets the parts as one string."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert "a\nb" == ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}])


def test_parts_are_passed_to_a_template_that_wants_them() -> None:
    """A template that loops over parts receives parts, also for a string."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    prompt = ChatTemplate(VISION).render(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    )

    assert "user:[a][b] assistant:[c] " == prompt


def test_white_space_of_blocks() -> None:
    """The line of a block adds no white space, as in transformers (trim_blocks, lstrip_blocks)."""
    block = "  {% if m.role == 'user' %}\n  {{ m.content }}\n  {% endif %}\n"
    text = "{% for m in messages %}\n" + block + "{% endfor %}\nEND"

    assert "  Hello <3\nEND" == ChatTemplate(text).render(HELLO)


def test_extensions() -> None:
    """Loop controls work; the generation tag, which only training needs, prints its body."""
    text = (
        "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.role }}{% endgeneration %}"
        "{{ x is defined }}{% break %}{% endfor %}"
    )

    assert "systemFalse" == ChatTemplate(text).render(HELLO)


def test_json_is_not_escaped() -> None:
    """The tojson filter keeps HTML, other scripts and the order of keys; it can indent."""
    text = "{{ tools | tojson }}{{ {'b': '<é>', 'a': 1} | tojson }}{{ [1] | tojson(indent=1) }}"

    prompt = ChatTemplate(text).render(HELLO, tools=[WEATHER])

    tool = '{"type": "function", "function": {"name": "weather", "description": "é", "parameters": {}}}'
    assert f'[{tool}]{{"b": "<é>", "a": 1}}[\n 1\n]' == prompt


def test_absent_variables() -> None:
    """Without tools and documents both are None; an unset variable prints nothing."""
    assert "True True ||" == ChatTemplate("{{ tools is none }} {{ documents is none }} |{{ other }}|").render(
        HELLO
    )


def test_template_variables() -> None:
    """chat_template_kwargs are variables, but cannot replace the messages."""
    text = "{{ enable_thinking }} {{ messages | length }} {{ add_generation_prompt }}"
    variables = {"enable_thinking": False, "messages": [], "add_generation_prompt": False}

    assert "False 2 True" == ChatTemplate(text).render(HELLO, chat_template_kwargs=variables)


def test_date() -> None:
    """strftime_now gives today's date, for templates that print one."""
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(HELLO).isdigit()


def test_developer_role() -> None:
    """The developer's messages become the system's, unless the template knows the role."""
    messages: list[Message] = [{"role": "developer", "content": "a"}]
    text = "{% for m in messages %}{{ m.role }}{% endfor %}"

    assert "system" == ChatTemplate(text).render(messages)
    assert "developer" == ChatTemplate(text + "{{ '' if 'developer' }}").render(messages)


@pytest.mark.parametrize(("said", "left"), [("once upon", "once upon"), ("once upon ", "once upon ")])
def test_continue_final_message(said: str, left: str) -> None:
    """The prompt ends with the text to continue, its last space included."""
    messages = [{"role": "user", "content": "A tale!"}, {"role": "assistant", "content": said}]

    prompt = ChatTemplate(CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)

    assert prompt == f"<|im_start|>user\nA tale!<|im_end|>\n<|im_start|>assistant\n{left}"


def test_continue_a_trimmed_message() -> None:
    """Where the template trims, the space at the end of the text to continue goes."""
    prompt = ChatTemplate("{{ messages[0].content | trim }}!").render(
        [{"role": "assistant", "content": "once "}], continue_final_message=True
    )

    assert "once" == prompt


def test_continue_the_last_part() -> None:
    """Of a message in parts, the last one is continued."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    prompt = ChatTemplate(VISION).render(
        [{"role": "assistant", "content": parts}], continue_final_message=True
    )

    assert "assistant:[a][b" == prompt


@pytest.mark.parametrize(("text", "content"), [("nothing", "a"), (VISION, [])])
def test_nothing_to_continue(text: str, content: object) -> None:
    """A final message that the template drops, or that is empty, cannot be continued."""
    with pytest.raises(BadRequestError, match="continue_final_message"):
        ChatTemplate(text).render([{"role": "assistant", "content": content}], continue_final_message=True)


def test_template_in_the_config(tmp_path: Path) -> None:
    """A template may stand in tokenizer_config.json."""
    assert "config" == template(tmp_path, chat_template="config").render(HELLO)


def test_template_file_wins(tmp_path: Path) -> None:
    """chat_template.jinja is newer than a template in the config."""
    assert "file" == template(tmp_path, "file", chat_template="config").render(HELLO)


def test_template_of_a_multimodal_model(tmp_path: Path) -> None:
    """Older multimodal models have their template in chat_template.json."""
    (tmp_path / "chat_template.json").write_text('{"chat_template": "processor"}')

    assert "processor" == template(tmp_path).render(HELLO)


def test_named_templates(tmp_path: Path) -> None:
    """Of several templates in the config, requests with tools get tool_use, all others default."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    found = template(tmp_path, chat_template=named)

    assert ("plain", "with tools") == (found.render(HELLO), found.render(HELLO, tools=[WEATHER]))


def test_additional_template_file(tmp_path: Path) -> None:
    """Named templates may be files, too."""
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    found = template(tmp_path, "plain")

    assert ("plain", "with tools") == (found.render(HELLO), found.render(HELLO, tools=[WEATHER]))


def test_no_template(tmp_path: Path) -> None:
    """A model without a template, such as a base model, is valid."""
    assert ChatTemplate.load(tmp_path) is None


def test_broken_template(tmp_path: Path) -> None:
    """A template that does not compile stops the start, not the first request."""
    with pytest.raises(ConfigError, match="does not compile"):
        template(tmp_path, "{% if %}")


@pytest.mark.parametrize("content", ["[]", "{", "\xff"])
def test_broken_config(tmp_path: Path, content: str) -> None:
    """A tokenizer_config.json that is not a JSON object is a ConfigError."""
    (tmp_path / "tokenizer_config.json").write_text(content, "latin-1")

    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


STRICT = """{% for m in messages %}
{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        (STRICT + "{{ m.content }}{% endfor %}", True),
        (
            "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}",
            True,
        ),  # not in vLLM's probe
        ("{% generation %}{% endgeneration %}", True),
        ("{{ messages[0].content + 1 }}", False),
    ],
)
def test_system_first(text: str, expected: bool) -> None:
    """Templates that reject a later system message are found by trying, in vLLM's plain sandbox."""
    assert expected is ChatTemplate(text).dialect.wants_system_first


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ messages[0].content }}", False),
        ("{{ messages[0].content }}{{ enable_thinking }}", True),
        ("{{ reasoning_effort }}", True),
        ("{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}", False),
        ("{{ 'max' if reasoning_effort not in ['low', 'high'] else reasoning_effort }}", False),
    ],
)
def test_skip_thinking(text: str, expected: bool) -> None:
    """A template can skip thinking if the effort "none" renders differently from every other."""
    assert expected is ChatTemplate(text).can_skip_thinking

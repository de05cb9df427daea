"""A prompt's text as Ray Serve's router takes it: what was written, without template or tokens."""

from __future__ import annotations

from kvrouter.tokens.prompt import ChatPrompt, Prompt, TextPrompt


def plain_text(prompt: Prompt | None) -> str:
    """Message contents joined without separator, text parts only; or the prompt. Token ids have none."""
    match prompt:
        case ChatPrompt():
            return "".join(_content(message.get("content")) for message in prompt.messages)
        case TextPrompt():
            return "".join(prompt.texts)
        case _:
            return ""


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str))

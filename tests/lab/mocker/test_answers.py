"""The answers of the simulated model."""

from __future__ import annotations

from kvrouter.lab.mocker.answers import Answer, Vocabulary
from kvrouter.lab.mocker.hashing import token_ids

PROMPT = list(range(100))


def answer(prompt: list[int], count: int, *, lora_name: str | None = None) -> list[int]:
    """The first tokens of the answer to a prompt."""
    answer = Answer(token_ids(prompt), Vocabulary(), lora_name=lora_name, may_end=False)
    return [answer.next_token() for _ in range(count)]


def test_same_prompt_same_answer() -> None:
    """Greedy decoding: only the prompt decides."""
    assert answer(PROMPT, 20) == answer(PROMPT, 20)
    assert answer(PROMPT, 20) != answer([*PROMPT, 1], 20)


def test_answer_continues_elsewhere() -> None:
    """The prompt and the first half of its answer continue with the second half."""
    whole = answer(PROMPT, 20)

    assert whole[10:] == answer(PROMPT + whole[:10], 10)


def test_lora_changes_the_answer() -> None:
    """An adapter is another model."""
    assert answer(PROMPT, 20) != answer(PROMPT, 20, lora_name="adapter")


def test_answers_end_by_themselves() -> None:
    """With a chance of 1 to 4 per token, a hundred tokens do not pass without an end."""
    vocabulary = Vocabulary(end=2, mean_answer_tokens=4)
    answer = Answer(token_ids(PROMPT), vocabulary, lora_name=None, may_end=True)

    assert 2 in [answer.next_token() for _ in range(100)]

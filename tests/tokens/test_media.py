"""Images in chats: their names and numbers of tokens equal vLLM's."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.wire.hashes import SEED as BLOCK_SEED
from kvrouter.core.wire.hashes import block_hashes, media_prompt_hashes, sequence_hashes
from kvrouter.tokens.image_headers import ImageHeader, read_header
from kvrouter.tokens.media import (
    MOST_IMAGES,
    Image,
    Images,
    VisionModel,
    estimated_tokens,
    expand,
    image_identifier,
)
from kvrouter.tokens.messages import ImagePlaceholder, as_string
from kvrouter.tokens.prompt import ChatPrompt, PromptEncoder
from kvrouter.tokens.template import ChatTemplate
from kvrouter.tokens.tiny import build_tiny_model

# Images of all formats with the identifiers of vLLM 0.32 for a model named "tiny-vl", and the token counts
# that follow from transformers' smart_resize for the tiny model with images.
IMAGES: list[dict[str, Any]] = json.loads(
    Path(__file__).parent.parent.joinpath("data", "images.json").read_text("utf-8")
)
NAMES = [each["name"] for each in IMAGES]
MODEL = "tiny-vl"


def url_of(name: str) -> str:
    """The image as a data: URL."""
    image = IMAGES[NAMES.index(name)]
    return f"data:image/png;base64,{image['base64']}"


def part(name: str, **more: Any) -> dict[str, Any]:
    """A part of content with an image of the file."""
    return {"type": "image_url", "image_url": {"url": url_of(name)}, **more}


def user(*parts: Any) -> dict[str, Any]:
    """A message."""
    return {"role": "user", "content": [{"type": "text", "text": "See"}, *parts]}


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with images."""
    path = tmp_path_factory.mktemp("models") / "tiny-vl"
    build_tiny_model(path, images=True)
    return path


@pytest.fixture(scope="session")
def vision(directory: Path) -> VisionModel:
    """How it carries images."""
    found = VisionModel.load(directory)
    assert found is not None
    return found


@pytest.mark.parametrize("image", IMAGES, ids=NAMES)
def test_equal_to_vllm(image: dict[str, Any], vision: VisionModel) -> None:
    """Size, colours, tokens and identifier of an image are those that the engine finds."""
    data = base64.b64decode(image["base64"])
    header = read_header(data)

    assert vision.tokens_of is not None
    assert header == ImageHeader(image["width"], image["height"], image["mode"] == "RGB")
    assert image["tokens"] == vision.tokens_of(header.width, header.height)
    assert image["identifier"] == image_identifier(data, header, MODEL)


@given(st.sampled_from(IMAGES), st.data())
def test_damaged_headers(image: dict[str, Any], draws: st.DataObject) -> None:
    """Any bytes have a header or none: nothing is raised, and nothing is read beyond the end."""
    data = bytearray(base64.b64decode(image["base64"]))
    del data[draws.draw(st.integers(0, len(data))) :]
    for _ in range(draws.draw(st.integers(0, 4))):
        if data:
            data[draws.draw(st.integers(0, min(len(data), 64) - 1))] = draws.draw(st.integers(0, 255))

    header = read_header(bytes(data))

    assert header is None or (header.width > 0 and header.height > 0)


@pytest.mark.parametrize(
    "data",
    [
        b"GIF89a" + bytes([1, 0, 1, 0, 0, 0, 0, 0x21, 0xFE]) + b"\x01x" * 100_000,
        b"\xff\xd8" + b"\xff\xfe\x00\x02" * 100_000,
        b"\xff\xd8" + b"\xff" * 100_000,
    ],
    ids=["gif", "jpeg", "fill bytes"],
)
def test_endless_headers(data: bytes) -> None:
    """A header of a hundred thousand parts is given up."""
    assert read_header(data) is None


@pytest.mark.parametrize(
    ("changes", "width", "height", "tokens"),
    [
        ({}, 28, 28, 4),
        ({}, 42, 56, 4),  # halves are rounded to even: 1.5 becomes 2
        ({}, 70, 56, 4),  # and so does 2.5
        ({}, 4000, 3000, 234),
        ({"max_pixels": None, "size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 16}}, 4000, 4000, 16),
        ({"patch_size": 16}, 320, 320, 100),
    ],
)
def test_tokens_of_qwen(
    directory: Path, tmp_path: Path, changes: dict[str, Any], width: int, height: int, tokens: int
) -> None:
    """Sizes come from the processor's file, in both of its forms; counts as of transformers 5.19."""
    processor = json.loads((directory / "preprocessor_config.json").read_text("utf-8")) | changes
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor), "utf-8")
    vision = VisionModel.load(tmp_path)

    assert vision is not None
    assert vision.tokens_of is not None
    assert tokens == vision.tokens_of(width, height) == vision.tokens_of(height, width)


@pytest.mark.parametrize(
    ("kind", "strategy", "tokens"),
    [
        ("clip_vision_model", "default", 576),
        ("clip_vision_model", "full", 577),
        ("siglip_vision_model", "full", 576),
    ],
)
def test_tokens_of_llava(tmp_path: Path, kind: str, strategy: str, tokens: int) -> None:
    """LLaVA 1.5 has one number for all images, as in vLLM's models/llava.py."""
    config = {
        "model_type": "llava",
        "image_token_index": 32000,
        "vision_feature_select_strategy": strategy,
        "vision_config": {"model_type": kind, "image_size": 336, "patch_size": 14},
    }
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    vision = VisionModel.load(tmp_path)

    assert vision is not None
    assert vision.tokens_of is not None
    assert (32000, "<image>") == (vision.image_token, vision.placeholder)
    assert tokens == vision.tokens_of(100, 900) == vision.tokens_of(1, 1)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"model_type": "llava"}', '{"model_type": "qwen2"}', '{"model_type": []}']
)
def test_other_models(tmp_path: Path, text: str) -> None:
    """A model that carries no images, or with a broken configuration, has no reader."""
    (tmp_path / "config.json").write_text(text, "utf-8")

    assert VisionModel.load(tmp_path) is None
    assert VisionModel.load(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("bad", "outcome"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}, "url"),
        ({"type": "image_url", "image_url": {"url": None}, "uuid": "unknown"}, "url"),
        ({"type": "image_url", "image_url": 7}, "options"),
        (part("rgb.png", uuid=[[]]), "options"),
        (part("rgb.png") | {"type": "image_pil"}, "kind"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "format"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,####"}}, "format"),
        ({"type": "image_url", "image_url": {"url": "data:image/bmp;base64,Qk0="}}, "format"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "kind"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "kind"),
        (part("rgb.png", fps=1), "options"),
    ],
)
def test_stops_before(vision: VisionModel, bad: dict[str, Any], outcome: str) -> None:
    """What is not exact, and all images after it, stay as they are, and the reason is reported."""
    placed = Images(vision).place([user(part("rgb.png"), bad, part("rgb.png"))], MODEL)

    assert outcome == placed.outcome
    assert 1 == len(placed.images)
    content = placed.messages[0]["content"]
    assert [False, True, False, False] == [isinstance(each, ImagePlaceholder) for each in content]


def test_other_reasons(vision: VisionModel) -> None:
    """Images of other roles, too many, and of engines whose hashes are unknown."""
    system = {"role": "system", "content": [part("rgb.png")]}

    assert "role" == Images(vision).place([system], MODEL).outcome
    assert "engine" == Images(vision).place([user(part("rgb.png"))], "").outcome
    many = Images(vision).place([user(*[part("rgb.png")] * (MOST_IMAGES + 1))], MODEL)
    assert ("many", MOST_IMAGES) == (many.outcome, len(many.images))


def test_uuids(vision: VisionModel) -> None:
    """A client's uuid is the name. Once it was seen with its image, it may come without."""
    images = Images(vision)
    alone = {"type": "image_url", "image_url": None, "uuid": "cat"}

    assert "url" == images.place([user(alone)], MODEL).outcome
    with_image = images.place([user(part("rgb.png", uuid="cat"))], MODEL)
    assert [Image("cat", 8)] == with_image.images == images.place([user(alone)], MODEL).images
    address = {"type": "image_url", "image_url": {"url": "https://x/cat.png"}, "uuid": "cat"}
    assert "exact" == images.place([user(address)], MODEL).outcome


@pytest.mark.parametrize(
    ("ids", "outcome"),
    [([1, 9, 9, 9, 2], "exact"), ([1, 9, 9, 3, 9, 9, 2], "answer"), ([1, 2], "answer"), ([], "answer")],
    ids=["run", "rows", "none", "refused"],
)
def test_engines_answer(ids: list[int], outcome: str) -> None:
    """An engine's ids tell the number of tokens, if they are one run of the image's token."""
    images = Images(VisionModel(9, "", None))
    chat = [user(part("rgb.png"))]

    assert "answer" == images.place(chat, MODEL).outcome
    (wanted,) = images.wanted()
    assert [{"role": "user", "content": [part("rgb.png")]}] == [wanted.message]
    assert [] == images.wanted()
    images.learn(wanted, ids)
    placed = images.place(chat, MODEL)

    assert outcome == placed.outcome
    expected = [Image(IMAGES[0]["identifier"], 3)]
    assert (expected if outcome == "exact" else []) == placed.images
    assert [] == images.wanted()  # it was answered


def test_an_engine_is_asked_about_a_uuid_at_an_address(vision: VisionModel) -> None:
    """It can fetch the image, and the name is known; an address alone names nothing."""
    images = Images(vision)
    address = {"type": "image_url", "image_url": {"url": "https://x/cat.png"}}

    assert "answer" == images.place([user(address | {"uuid": "cat"})], MODEL).outcome
    assert "url" == images.place([user(address)], MODEL).outcome
    (wanted,) = images.wanted()
    images.learn(wanted, [vision.image_token] * 5)
    assert [Image("cat", 5)] == images.place([user(address | {"uuid": "cat"})], MODEL).images


def test_images_to_ask_about_are_bounded() -> None:
    """A few at a time, each once."""
    images = Images(VisionModel(9, "", None))
    for number in range(100):
        address = {"type": "image_url", "image_url": {"url": "https://x"}, "uuid": number // 2}
        images.place([user(address)], MODEL)

    assert list(map(str, range(8))) == [wanted.identifier for wanted in images.wanted()]


def test_remembered_images_are_bounded(vision: VisionModel) -> None:
    """The least recently used is forgotten, and found again from its bytes."""
    images = Images(vision, most=2)
    for name in ("rgb.png", "rgba.png", "rgb.jpg"):
        images.place([user(part(name))], MODEL)

    assert 2 == len(images)
    assert 8 == images.place([user(part("rgb.png"))], MODEL).images[0].tokens


def test_the_model_is_part_of_the_name(vision: VisionModel) -> None:
    """The same image has other names for other models."""
    images = Images(vision)
    names = [images.place([user(part("rgb.png"))], model).images[0].identifier for model in ("a", "b")]

    assert names[0] != names[1]


def test_expand() -> None:
    """Each placeholder becomes the image's tokens; other numbers of placeholders have no expansion."""
    images = [Image("0" * 16, 3), Image("1" * 16, 1)]

    ids, spans = expand([5, 9, 6, 9, 7], 9, images) or ((), ())
    assert [5, 9, 9, 9, 6, 9, 7] == list(ids)
    assert [(1, 4, 0), (5, 6, 0x1111111111111111)] == spans
    assert expand([5, 9, 6], 9, images) is None
    assert expand([9, 9, 9], 9, images) is None


def test_hashes_are_those_of_the_events() -> None:
    """A prompt's names are those that an agent makes of an event's tokens and extra keys."""
    tokens, spans = list(range(70)), [(10, 33, 0xAB << 56), (33, 40, 7)]
    named = [(start, end, f"{item:016x}") for start, end, item in spans]

    expected = sequence_hashes(block_hashes(tokens, 16, multimodal=named))
    assert expected == list(media_prompt_hashes(tokens, 16, BLOCK_SEED, spans))
    plain = sequence_hashes(block_hashes(tokens, 16))
    assert all(ours != theirs for ours, theirs in zip(expected, plain, strict=True))


@pytest.fixture(scope="session")
def encoder(directory: Path) -> Any:
    """Its tokenizer and template."""
    with PromptEncoder.load(directory, threads=2) as encoder:
        yield encoder


async def test_prompt(encoder: PromptEncoder, vision: VisionModel) -> None:
    """A chat with two images is encoded as the engine does: the ids around them, and their places."""
    chat = ChatPrompt([user(part("rgb.png"), {"type": "text", "text": "and"}, part("rgba.png"))])

    found = await encoder.encode_known(chat, engine_model=MODEL)

    assert found is not None
    (encoded,) = found
    assert "exact" == encoded.media_outcome
    assert [8, 6] == [end - start for start, end, _ in encoded.media]
    images = [IMAGES[NAMES.index(name)] for name in ("rgb.png", "rgba.png")]
    assert [int(each["identifier"][:16], 16) for each in images] == [item for _, _, item in encoded.media]
    assert 14 == list(encoded.ids).count(vision.image_token)
    text = "<|im_start|>user\nSee<|vision_start|>" + "<|image_pad|>" * 8 + "<|vision_end|>and"
    assert encoder.decode(encoded.ids).startswith(text)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda chat: chat | {"has_media_options": True}, "options"),
        (lambda chat: chat | {"kept_tokens": slice(-5, None)}, "options"),
        (
            lambda chat: (
                chat | {"messages": [user({"type": "text", "text": "<|image_pad|>"}, part("rgb.png"))]}
            ),
            "template",
        ),
    ],
)
async def test_not_exact(
    encoder: PromptEncoder, change: Callable[[dict[str, Any]], dict[str, Any]], outcome: str
) -> None:
    """Options for the processor, truncation, a placeholder in the text: the prompt keeps its texts only."""
    chat = ChatPrompt(**change({"messages": [user(part("rgb.png"))]}))

    found = await encoder.encode_known(chat, engine_model=MODEL)

    assert found is not None
    assert [outcome] == [each.media_outcome for each in found]
    assert not found[0].media


@pytest.mark.parametrize(
    ("media", "tokens"),
    [
        (part("large.png"), 1200 * 900 // 784),
        (part("rgb.png"), 7),
        (part("grey.png") | {"image_url": {"url": url_of("grey.png") + "=" * 40_000}}, 576),
        ({"type": "image_url", "image_url": {"url": "https://x/y.png"}}, 576),
        ({"type": "input_audio"}, 576),
        (ImagePlaceholder("<i>"), 0),
        ({"type": "text", "text": "a"}, 0),
    ],
)
def test_estimates(media: dict[str, Any], tokens: int) -> None:
    """Media that are not placed count by their pixels if these are known, else like an image of LLaVA."""
    assert tokens == estimated_tokens([user(media), {"role": "user", "content": "text"}])


async def test_a_prompt_that_is_known_in_part(encoder: PromptEncoder) -> None:
    """The tokens of its other images are estimated, so that they count in the load."""
    address = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}

    found = await encoder.encode_known(ChatPrompt([user(part("rgb.png"), address)]), engine_model=MODEL)

    assert found is not None
    assert [("url", 576)] == [(each.media_outcome, each.isl - len(each.ids)) for each in found]
    assert [8] == [end - start for each in found for start, end, _ in each.media]


async def test_models_without_images(tiny: Path) -> None:
    """A text model says that it knows no images."""
    with PromptEncoder.load(tiny, threads=1) as encoder:
        found = await encoder.encode_known(ChatPrompt([user(part("rgb.png"))]), engine_model=MODEL)

    assert found is not None
    assert "model" == found[0].media_outcome


def test_content_as_text() -> None:
    """For templates that take text, the images come first, each on a line, as in vLLM."""
    parts = [{"type": "text", "text": "a"}, ImagePlaceholder("<image>"), {"type": "text", "text": "b"}]

    assert "<image>\na\nb" == as_string(parts)
    assert "<image>" == as_string(parts[1:2])


def test_a_message_with_images_is_continued() -> None:
    """The end of the last text is where it goes on, also before an image."""
    template = ChatTemplate(
        "{% for m in messages %}{% for p in m.content %}{{ p.text or '<i>' }}{% endfor %}{% endfor %}"
    )
    content = [{"type": "text", "text": "see"}, ImagePlaceholder("<i>")]

    assert "see" == template.render([{"role": "user", "content": content}], continue_final_message=True)

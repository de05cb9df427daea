"""Images of a chat as the engine caches them: their name, and the number of tokens that they become.

    part of a message   data: URL ──> bytes ──> BLAKE3 as in vLLM ──> identifier, or the client's `uuid`
                                        └─────> header: 640 × 480 ──> 391 placeholder tokens
    prompt's ids        … 151652 151655 151653 …   ──>   … 151652 151655 × 391 151653 …
    blocks              those that the 391 tokens touch are named by the identifier, too

Nothing is fetched and nothing is decompressed. The first part of a prompt that cannot be placed exactly, and
all after it, stay a text that names their content: overlap ends there, for the reason in `Placed.outcome`.

Sources: vLLM 0.32 (multimodal/hasher.py, models/qwen2_vl.py, models/llava.py), transformers 5 (smart_resize).
"""

from __future__ import annotations

import base64
import json
import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

from blake3 import blake3
from msgspec import Struct
from xxhash import xxh3_128_digest

from kvrouter.core.wire.hashes import MediaSpan, multimodal_id
from kvrouter.tokens.image_headers import ImageHeader, read_header
from kvrouter.tokens.messages import ImagePlaceholder, Message, is_text

Outcome: TypeAlias = Literal[
    "exact",
    "model",  # the model's configuration here names no token for images
    "engine",  # how the engine names images is not known (not vLLM from 0.32 on, or its model's name is not)
    "answer",  # an engine is asked how many tokens the image has, or did not say it
    "way",  # the prompt was not tokenized here
    "url",  # the image is not in the request, and its uuid not known
    "format",  # neither base64 of a PNG, JPEG, WebP or GIF
    "kind",  # audio, video, embeddings
    "options",  # options of the processor, or unknown fields
    "role",  # not in a message of a user
    "template",  # the prompt has other placeholders than images
    "many",  # more images, or more tokens of them, than MOST_IMAGES and MOST_TOKENS
]
"""How much is known of a prompt with media: everything, or why overlap ends before one of them."""

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
MOST_IMAGES = 256
# In one prompt, all images together.
MOST_TOKENS = 1 << 20
# Images that are remembered, some 300 bytes each.
MOST_REMEMBERED = 10_000
# Characters of base64 that are read in one call, 0.5 ms.
_PIECE = 1 << 18
_MOST_CONFIG_BYTES = 4 << 20
# What vLLM reads of an image's part; it passes any other field to the template.
_FIELDS = frozenset({"type", "image_url", "uuid", "detail"})

# Images to ask an engine about, and characters of each one's URL.
_MOST_WANTED = 8
_MOST_WANTED_CHARACTERS = 16 << 20

# Of media whose size is not known either: an image in LLaVA 1.5.
_ANY_TOKENS = 576
# Qwen2-VL's least and most.
_LEAST_ESTIMATE, _MOST_ESTIMATE = 4, 16_384
_PIXELS_PER_TOKEN = 28 * 28
# Base64 in which most headers end: 30 µs to read.
_HEADER_CHARACTERS = 1 << 14

TokensOf: TypeAlias = Callable[[int, int], int]
"""The placeholder tokens of an image of this width and height."""


class VisionModel(Struct, frozen=True):
    """How one model's prompts carry images."""

    image_token: int
    placeholder: str
    """Of one image, in texts for templates that take content as text; empty: not known."""
    tokens_of: TokensOf | None
    """None: only an engine knows it."""

    @classmethod
    def load(cls, model_path: Path) -> Self | None:
        """From the configuration in a model directory; None if it names no token for images."""
        try:
            config = _read_json(model_path / "config.json")
            family = _FAMILIES.get(config.get("model_type", ""), _other)
            token, placeholder, tokens_of = family(config, _processor(model_path))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None  # a model that is only served as text may have any config
        return cls(token, placeholder, tokens_of)


class Image(NamedTuple):
    """An image of a prompt: its name in the engine's hashes, and its placeholder tokens.

    0 tokens: an engine was asked, and did not say it.
    """

    identifier: str
    tokens: int


class WantedMedia(NamedTuple):
    """An image whose number of tokens only an engine knows, and a message to tokenize that has it alone."""

    key: bytes
    identifier: str
    message: Message


class Placed(NamedTuple):
    """The messages with a placeholder for each of `images`."""

    messages: Sequence[Message]
    images: Sequence[Image]
    outcome: Outcome


class Images:
    """Finds the images of chats for one model. Thread-safe.

    A client sends an image again with each turn, so those of the last prompts are remembered by their URL:
    reading base64 takes 70 times as long as hashing it (docs/tokens.md).
    """

    def __init__(self, vision: VisionModel, most: int = MOST_REMEMBERED) -> None:
        self.vision = vision
        self._most = most
        self._known: OrderedDict[bytes, Image] = OrderedDict()
        self._wanted: dict[bytes, WantedMedia] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def place(self, messages: Sequence[Message], engine_model: str) -> Placed:
        """Put placeholders for the images of a chat, up to the first part that is not exact.

        `engine_model`: the model's name in the engine's hashes; empty: not known.
        """
        if not engine_model:
            return Placed(messages, (), "engine")
        images: list[Image] = []
        outcome: Outcome = "exact"
        placed: list[Message] = []
        for message in messages:
            content = message.get("content")
            parts = list(content) if isinstance(content, list) else []
            for index, part in enumerate(parts):
                if outcome != "exact" or not isinstance(part, dict) or is_text(part):
                    continue
                image = self._image(part, message.get("role"), engine_model)
                if not isinstance(image, Image):
                    outcome = image
                elif len(images) == MOST_IMAGES or image.tokens + _tokens(images) > MOST_TOKENS:
                    outcome = "many"
                else:
                    images.append(image)
                    parts[index] = ImagePlaceholder(self.vision.placeholder)
            placed.append({**message, "content": parts} if parts else message)
        return Placed(placed, images, outcome)

    def _image(self, part: Mapping[str, Any], role: object, engine_model: str) -> Image | Outcome:
        given, uuid = part.get("image_url"), part.get("uuid")
        url = given.get("url") if isinstance(given, dict) else given
        if reason := _not_an_image(part, role):
            return reason
        if not isinstance(url, str | None) or not isinstance(uuid, str | int | None):
            return "options"  # the engine decides
        # with a uuid the engine does not hash the image, so it may be left out, or be at an address
        name = f"{engine_model} {url}" if uuid is None else f"uuid {uuid}"
        key = xxh3_128_digest(name.encode("utf-8", "surrogatepass"))
        image = self._recall(key)
        if image is None:
            read = self._read(url, engine_model)
            if isinstance(read, str) and (uuid is None or url is None):
                return read
            identifier, tokens = ("", None) if isinstance(read, str) else read
            identifier = identifier if uuid is None else str(uuid)
            if tokens is None:
                message = {"role": "user", "content": [dict(part)]}
                self._want(WantedMedia(key, identifier, message), len(url or ""))
                return "answer"
            image = self._remember(key, Image(identifier, tokens))
        return image if image.tokens else "answer"

    def _read(self, url: str | None, engine_model: str) -> tuple[str, int | None] | Outcome:
        """Identifier and tokens of the image in a URL."""
        if url is None or url[:5].lower() != "data:":
            return "url"
        data = _data_of(url)
        header = None if data is None else read_header(data)
        if data is None or header is None:
            return "format"
        identifier, tokens_of = image_identifier(data, header, engine_model), self.vision.tokens_of
        try:
            return identifier, None if tokens_of is None else tokens_of(header.width, header.height)
        except ValueError:
            return "format"  # the engine rejects such a shape

    def wanted(self) -> list[WantedMedia]:
        """The images to ask an engine about. Each is returned once, and again when it is seen again."""
        with self._lock:
            wanted, self._wanted = self._wanted, {}
        return [*wanted.values()]

    def learn(self, wanted: WantedMedia, ids: Sequence[int]) -> None:
        """Remember the tokens of an image by the engine's ids of its message; without ids, that it has none.

        An image that is not one run of its token (rows with ends, as of Pixtral) is not placed.
        """
        places = [place for place, token in enumerate(ids) if token == self.vision.image_token]
        is_run = bool(places) and places[-1] - places[0] + 1 == len(places)
        self._remember(wanted.key, Image(wanted.identifier, len(places) if is_run else 0))

    def _want(self, wanted: WantedMedia, characters: int) -> None:
        with self._lock:
            if len(self._wanted) < _MOST_WANTED and characters <= _MOST_WANTED_CHARACTERS:
                self._wanted[wanted.key] = wanted

    def _recall(self, key: bytes) -> Image | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def _remember(self, key: bytes, image: Image) -> Image:
        with self._lock:
            self._known[key] = image
            self._known.move_to_end(key)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        return image


def _not_an_image(part: Mapping[str, Any], role: object) -> Outcome | None:
    """Why a part of content is not an image that can be placed; None if it may be one."""
    if "image_url" not in part or str(part.get("type") or "image_url") not in {"image_url", "input_image"}:
        return "kind"
    if not part.keys() <= _FIELDS:
        return "options"
    return "role" if role != "user" else None


def _tokens(images: Sequence[Image]) -> int:
    return sum(image.tokens for image in images)


def expand(
    ids: Sequence[int], image_token: int, images: Sequence[Image]
) -> tuple[array[int], list[MediaSpan]] | None:
    """The ids with each placeholder repeated, and where; None if there are other placeholders than images."""
    places = [index for index, token in enumerate(ids) if token == image_token]
    if len(places) != len(images):
        return None
    expanded, spans, copied = array("I"), [], 0
    for place, image in zip(places, images, strict=True):
        expanded.extend(ids[copied:place])
        start = len(expanded)
        expanded.extend([image_token] * image.tokens)
        spans.append((start, start + image.tokens, multimodal_id(image.identifier)))
        copied = place + 1
    expanded.extend(ids[copied:])
    return expanded, spans


def estimated_tokens(messages: Sequence[Message]) -> int:
    """About how many tokens the media of a chat become that are not placed: what loads are compared by."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    media = [part for part in parts if isinstance(part, dict) and not is_text(part)]
    return sum(_estimate(part) for part in media[:MOST_IMAGES] if not isinstance(part, ImagePlaceholder))


def _estimate(part: Mapping[str, Any]) -> int:
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    data = _data_of(url, _HEADER_CHARACTERS) if isinstance(url, str) else None
    header = read_header(data) if data is not None else None
    if header is None:
        return _ANY_TOKENS
    return min(max(header.width * header.height // _PIXELS_PER_TOKEN, _LEAST_ESTIMATE), _MOST_ESTIMATE)


def image_identifier(data: bytes, header: ImageHeader, engine_model: str) -> str:
    """The name that vLLM's MultiModalHasher gives the bytes of an image, with the default BLAKE3."""
    digest = blake3(_framed(b"image") + b"\x03" + _framed(b"image"))
    digest.update(b"" if header.is_rgb else _CONVERTED)  # vLLM converts it, and the hash says so
    digest.update(b"\x03" + len(data).to_bytes(8, "little"))
    digest.update(data)
    digest.update(_framed(b"model_id") + b"\x03" + _framed(engine_model.encode()))
    return digest.hexdigest()


def _data_of(url: str, most_characters: int | None = None) -> bytes | None:
    """The bytes in a `data:` URL, or the first of them; None if it is another, or they are not in base64.

    `most_characters`: a multiple of 4.
    """
    comma = url.find(",", 0, 1024)
    if url[:5].lower() != "data:" or comma < 0 or not url.endswith(";base64", 0, comma):
        return None
    end = len(url) if most_characters is None else min(len(url), comma + 1 + most_characters)
    # in pieces: one call for a large image would keep the GIL, and with it the event loop, for its whole time
    starts = range(comma + 1, end, _PIECE)
    try:
        return b"".join(
            base64.b64decode(url[start : min(start + _PIECE, end)], validate=True) for start in starts
        )
    except ValueError:
        return None


# --- how many tokens ---


def smart_resize(width: int, height: int, *, factor: int, least: int, most: int) -> tuple[int, int]:
    """Qwen's picture size: multiples of `factor`, between `least` and `most` pixels.

    Raises ValueError for sides that differ more than 200 times.
    """
    if max(width, height) > 200 * min(width, height):
        raise ValueError(f"{width} × {height}")
    wide, high = round(width / factor) * factor, round(height / factor) * factor
    if wide * high > most:
        scale = math.sqrt(height * width / most)
        wide = max(factor, math.floor(width / scale / factor) * factor)
        high = max(factor, math.floor(height / scale / factor) * factor)
    elif wide * high < least:
        scale = math.sqrt(least / (height * width))
        wide = math.ceil(width * scale / factor) * factor
        high = math.ceil(height * scale / factor) * factor
    return wide, high


def _qwen(config: Mapping[str, Any], processor: Mapping[str, Any]) -> _Read:
    """Qwen2-VL and its successors: a token for each square of merged patches."""
    size = processor.get("size") or {}
    least = int(processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
    most = int(processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)
    factor = int(processor.get("patch_size") or 14) * int(processor.get("merge_size") or 2)
    if min(least, most, factor) < 1:
        raise ValueError("sizes must be positive")

    def tokens_of(width: int, height: int) -> int:
        wide, high = smart_resize(width, height, factor=factor, least=least, most=most)
        return (wide // factor) * (high // factor)

    return _token(config), "<|vision_start|><|image_pad|><|vision_end|>", tokens_of


def _llava(config: Mapping[str, Any], _: Mapping[str, Any]) -> _Read:
    """LLaVA 1.5: one size for all images. CLIP has a token for the class, which is left out by default."""
    vision = config["vision_config"]
    patches = (int(vision["image_size"]) // int(vision["patch_size"])) ** 2
    has_class = {"clip_vision_model": 1, "siglip_vision_model": 0}[vision["model_type"]]
    left_out = {"default": 1, "full": 0}[config.get("vision_feature_select_strategy", "default")]
    count = patches + has_class - left_out
    return _token(config), "<image>", lambda _width, _height: count


def _other(config: Mapping[str, Any], _: Mapping[str, Any]) -> _Read:
    """Any other model: an engine tells how many tokens an image has."""
    return _token(config), "", None


def _token(config: Mapping[str, Any]) -> int:
    """Raises KeyError if the model has no images."""
    return int(config["image_token_id"] if "image_token_id" in config else config["image_token_index"])


_Read: TypeAlias = tuple[int, str, TokensOf | None]
"""Token, placeholder and arithmetic, from config.json and the processor's settings."""
_Family: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], _Read]
_FAMILIES: dict[str, _Family] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "llava": _llava,
}


def _processor(model_path: Path) -> dict[str, Any]:
    """The image processor's settings, where transformers looks for them first."""
    nested = _read_json(model_path / "processor_config.json").get("image_processor")
    return nested if isinstance(nested, dict) else _read_json(model_path / "preprocessor_config.json")


def _read_json(file: Path) -> dict[str, Any]:
    """Empty if there is no such file. Raises OSError or ValueError."""
    if not file.is_file():
        return {}
    if file.stat().st_size > _MOST_CONFIG_BYTES:
        raise ValueError(f"{file} is larger than {_MOST_CONFIG_BYTES} bytes")
    value = json.loads(file.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return value


# --- vLLM's framing of what it hashes ---


def _framed(chunk: bytes) -> bytes:
    return len(chunk).to_bytes(8, "little") + chunk


def _converted() -> bytes:
    """`{"io_config": {"image_mode": "RGB", "rgba_background_color": (255, 255, 255)}, "data":` so framed."""
    two, three = (2).to_bytes(8, "little"), (3).to_bytes(8, "little")
    white = b"\x03" + _framed((255).to_bytes(8, "little"))
    mode = _framed(b"image_mode") + b"\x03" + _framed(b"RGB")
    background = _framed(b"rgba_background_color") + b"\x01" + three + 3 * white
    settings = _framed(b"io_config") + b"\x02" + two + mode + background
    return b"\x02" + two + settings + _framed(b"data")


_CONVERTED = _converted()

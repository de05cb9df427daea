"""What the adapters of engines call: an engine's stores and removals, as ops of KV feeds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvrouter.core.wire.ops import DEVICE, TIERS, Op
from kvrouter.worker.blocks.engine_blocks import BlockIds, EngineBlocks, EngineHash


class Sink(ABC):
    """One rank's blocks. A KvPublisher publishes the ops; `kvrouter verify` compares with them."""

    def __init__(self, blocks: EngineBlocks, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        # The largest block size of a store on the device in this life of the engine; 0: none yet.
        self.event_block_size = 0

    @abstractmethod
    def _collect(self, ops: list[Op]) -> None:
        """Take what has changed."""

    def stored(  # noqa: PLR0917  # a public name: callers may pass these by position
        self,
        engine_hashes: Sequence[EngineHash],
        token_ids: Sequence[int],
        parent: EngineHash | None = None,
        lora_name: str | None = None,
        salt: str | None = None,
        tier: str = "device",
        *,
        ids: Sequence[BlockIds] = (),
        block_size: int | None = None,
    ) -> None:
        """The engine stored a chain of blocks; the parent of the first one is `parent`.

        Hashes are the engine's own names: any integers or bytes. `token_ids` has the tokens of all blocks in
        order; if it is empty, only hashes that are known already count (a copy in another tier). `lora_name`
        and `salt` matter at a root, and hold for all blocks below it. `ids`: per block, the 64-bit ids of the
        multimodal items that touch it; None for a block that cannot be named. `block_size`: the size of these
        blocks, if it may differ from the publisher's. Raises ValueError if the arguments do not fit together.
        """
        self._collect(
            self.blocks.stored(
                engine_hashes,
                token_ids,
                block_size=self.block_size if block_size is None else block_size,
                parent=parent,
                lora_name=lora_name,
                salt=salt,
                ids=ids,
                tier=_tier_number(tier),
            )
        )
        if block_size is not None and tier == TIERS[DEVICE]:
            self.event_block_size = max(self.event_block_size, block_size)

    def stored_chunks(
        self,
        chunk_hashes: Sequence[EngineHash],
        token_ids: Sequence[int],
        parent: EngineHash | None,
        tier: str,
    ) -> None:
        """A tier outside the engine stored chunks of whole blocks under hashes of its own.

        A chunk whose size is not a multiple of the block size is ignored. See EngineBlocks.stored_chunks.
        """
        block_size = self.event_block_size or self.block_size
        ops = self.blocks.stored_chunks(
            chunk_hashes, token_ids, block_size=block_size, parent=parent, tier=_tier_number(tier)
        )
        self._collect(ops)

    def removed(self, engine_hashes: Sequence[EngineHash], tier: str = "device") -> None:
        """The engine removed one copy of each of these blocks from a tier."""
        self._collect(self.blocks.removed(engine_hashes, _tier_number(tier)))

    def group_stored(
        self, group: int, needed: int, engine_hashes: Sequence[EngineHash], *, is_root: bool
    ) -> None:
        """The engine stored blocks in a KV group besides the one whose blocks `stored` names.

        The engine resumes a prompt only where the group has the last `needed` blocks before (0: all of them).
        `is_root`: the first block begins a prompt.
        """
        self._collect(self.blocks.group_stored(group, needed, engine_hashes, is_root=is_root))

    def group_removed(self, group: int, engine_hashes: Sequence[EngineHash]) -> None:
        """The engine removed one copy of each of these blocks from such a group."""
        self._collect(self.blocks.group_removed(group, engine_hashes))

    def cleared(self) -> None:
        """The engine removed all blocks from all tiers."""
        self._collect(self.blocks.cleared())

    def begin_life(self) -> None:
        """The engine is another process: forget the blocks of the former one, and their size."""
        self.event_block_size = 0
        self.cleared()


def _tier_number(tier: str) -> int:
    if tier not in TIERS:
        raise ValueError(f"tier {tier!r}: use one of {', '.join(TIERS)}")
    return TIERS.index(tier)

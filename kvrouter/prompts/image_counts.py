"""Asks engines how many tokens an image has, for models whose arithmetic is not known here.

    request with a new image ──> Images.wanted ──> /tokenize of a message with that image alone
    next request with it     <── Images.learn  <── its ids have the image's token 1,176 times

No request waits for it. An engine fetches an image at an address, as it does for the request itself.
"""

from __future__ import annotations

import asyncio

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.prompts.checks import engine_url
from kvrouter.prompts.ways import EncoderOf
from kvrouter.tokens.prompt import ChatPrompt
from kvrouter.tokens.remote_tokenizer import EngineTokenizer, EngineTokenizerError, RefusedError

LOOK_EVERY_S = 0.5


class ImageCounts:
    def __init__(self, replica: Replica, encoders: EncoderOf, engines: EngineTokenizer) -> None:
        self._replica = replica
        self._encoders = encoders
        self._engines = engines

    async def run(self) -> None:
        """Never returns."""
        while True:
            for router in list(self._replica.routers.values()):
                if router.pool.targets:
                    await self.look(router.pool)
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self, pool: Pool) -> None:
        """Ask an engine about the images that were seen since, one after the other."""
        images, url = self._encoders.of(pool).images, engine_url(pool, None)
        if images is None or url is None:
            return
        for wanted in images.wanted():
            try:
                (ids,) = await self._engines.tokenize(url, None, ChatPrompt([wanted.message]))
            except RefusedError:
                images.learn(wanted, ())
            except EngineTokenizerError:
                pass  # asked again when the image is seen again
            else:
                images.learn(wanted, ids)

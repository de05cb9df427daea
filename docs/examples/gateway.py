"""A gateway of one's own: a router chooses, this relays, and says what becomes of each request."""

import os
import time
from collections.abc import AsyncIterator

from aiohttp import ClientSession, web

ROUTER = os.environ.get("ROUTER", "http://127.0.0.1:8092")


async def relay(request: web.Request) -> web.StreamResponse:
    http: ClientSession = request.app[HTTP]
    body = await request.json()
    async with http.post(f"{ROUTER}/select_and_reserve", json={"request": body}) as asked:
        placed = await asked.json()
        if asked.status != 200:
            return web.json_response(placed, status=asked.status)
    reservation = f"{ROUTER}/reservations/{placed['selection_id']}"
    try:
        url, headers = placed["endpoint"] + request.path, placed["headers"]
        async with http.post(url, json=body, headers=headers) as engine:
            answer = web.StreamResponse(status=engine.status)
            answer.content_type = engine.content_type
            await answer.prepare(request)
            events, reported = 0, 0.0
            async for data in engine.content.iter_any():
                await answer.write(data)
                if not reported:
                    await http.post(f"{reservation}/prefill_complete")
                events += data.count(b"data:")  # about one token each
                if time.monotonic() - reported > 1:  # also keeps the lease
                    reported = time.monotonic()
                    await http.post(f"{reservation}/output_block", json={"output_tokens": events})
            return answer
    finally:
        await http.delete(reservation)


async def client(app: web.Application) -> AsyncIterator[None]:
    async with ClientSession() as app[HTTP]:
        yield


HTTP = web.AppKey("http", ClientSession)
app = web.Application()
app.cleanup_ctx.append(client)
app.router.add_post("/v1/{path:.*}", relay)
if __name__ == "__main__":
    web.run_app(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8080")))

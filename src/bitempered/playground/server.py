"""The server of the playground: a page, and for each page that is open a training session over a WebSocket.

A page sends JSON: {"settings": {...}} starts over, {"run": true} or false, {"probe": [x, y]} or null. It gets
{"start": ...} with the problem, {"frame": ...} about 20 times a second while the nets train, or {"error": "..."}.
"""

import asyncio
import ipaddress
import json
import logging
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import FileResponse, PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from bitempered.playground.settings import LONGEST_TEXT, Settings, read_point, shown
from bitempered.playground.training import STEPS_PER_FRAME, Duel

__all__ = ["Limits", "listen", "new_server", "serve"]

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
REQUEST_SECONDS = 10  # for a connection to send its first request
MOST_UNREAD = 2**20  # bytes that wait for a page; frames have about 20,000
# What sending to a page raises if it has gone or takes nothing. In Python 3.10 this time-out is not the built-in one.
GONE = (WebSocketDisconnect, asyncio.TimeoutError, OSError)


class Limits:
    """What a server allows at most."""

    sessions = 16
    connections = 500  # over HTTP
    frames_per_second = 20
    messages_per_second = 100  # of one page; more of them wait
    idle_seconds = 900.0  # without a message of the page
    send_seconds = 20.0  # for a page to take a frame


class Session:
    """One page: reads what it asks for, trains, and pushes frames. Only the latest request of a kind is kept."""

    def __init__(self, page: WebSocket, workers: ThreadPoolExecutor, limits: Limits) -> None:
        self.page, self.workers, self.limits = page, workers, limits
        self.asked: Settings | None = None
        self.running = True
        self.probe: tuple[float, float] | None = None
        self.wanted = asyncio.Event()  # there is something to compute
        self.sending = asyncio.Lock()
        self.ended = False

    async def run(self) -> None:
        tasks = [asyncio.create_task(self.read()), asyncio.create_task(self.train())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, GONE):
                raise end

    async def read(self) -> None:
        while True:
            try:
                message = await asyncio.wait_for(self.page.receive(), self.limits.idle_seconds)
            except asyncio.TimeoutError:
                minutes = self.limits.idle_seconds / 60
                await self.end(1001, f"this page was not used for {minutes:.0f} minutes: connect again to go on")
                return
            if message["type"] == "websocket.disconnect":
                return
            try:
                self.take(message.get("text"))
            except ValueError as error:
                await self.send({"error": str(error)})
            await asyncio.sleep(1 / self.limits.messages_per_second)

    def take(self, text: str | None) -> None:
        """Note what a message asks for; a ValueError says what is wrong with it."""
        try:
            asked = json.loads(text or "")
        except (ValueError, RecursionError):
            raise ValueError("a message must be JSON text") from None
        if not isinstance(asked, dict) or len(asked) != 1 or not asked.keys() <= {"settings", "run", "probe"}:
            raise ValueError(f"a message must be an object with one of: settings, run, probe; got {shown(asked)}")
        [(name, value)] = asked.items()
        if name == "settings":
            self.asked = Settings.read(value)
        elif name == "probe":
            self.probe = None if value is None else read_point(value)
        elif isinstance(value, bool):
            self.running = value
        else:
            raise ValueError(f"run must be true or false, got {shown(value)}")
        self.wanted.set()

    async def train(self) -> None:
        loop = asyncio.get_running_loop()
        duel: Duel | None = None
        while True:
            await self.wanted.wait()
            self.wanted.clear()
            started = loop.time()
            if self.asked is not None:
                asked, self.asked = self.asked, None
                duel = await loop.run_in_executor(self.workers, Duel, asked)
                await self.send({"start": duel.start()})
                steps = 0  # show the untrained nets first
            else:
                steps = STEPS_PER_FRAME if self.running else 0
            if duel is None:
                continue
            frame = await loop.run_in_executor(self.workers, duel.advance, steps, self.probe)
            await self.send({"frame": frame})
            if self.running and not duel.done:
                self.wanted.set()
            await asyncio.sleep(max(0.0, started + 1 / self.limits.frames_per_second - loop.time()))

    async def send(self, message: dict[str, Any]) -> None:
        async with self.sending:
            if self.ended:
                return
            await asyncio.wait_for(self.page.send_text(json.dumps(message)), self.limits.send_seconds)

    async def end(self, code: int, reason: str) -> None:
        await self.send({"error": reason})
        self.ended = True
        await self.page.close(code, reason)


def application(host: str, limits: Limits) -> Callable[..., Awaitable[None]]:
    """The web application for a server that listens on `host`."""
    workers = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="playground")
    sessions: set[Session] = set()

    async def train(page: WebSocket) -> None:
        await page.accept()
        session = Session(page, workers, limits)
        with suppress(*GONE):
            if len(sessions) >= limits.sessions:
                await session.end(1013, f"{limits.sessions} pages are open already: close one, then connect again")
                return
            sessions.add(session)
            try:
                await session.run()
            finally:
                sessions.discard(session)

    files = {"/": "index.html"} | {f"/{path.name}": path.name for path in PAGE.iterdir() if path.suffix in TYPES}
    routes: list[Any] = [Route(path, partial(send_file, name), methods=["GET"]) for path, name in files.items()]
    return guarded(Starlette(routes=[*routes, WebSocketRoute("/train", train)]), own_names(host))


async def send_file(name: str, request: Any) -> FileResponse:
    return FileResponse(PAGE / name, media_type=TYPES[Path(name).suffix])


def own_names(host: str) -> set[str]:
    return {"localhost", host.lower(), socket.gethostname().lower()} - {""}


def guarded(app: Callable[..., Awaitable[None]], names: set[str]) -> Callable[..., Awaitable[None]]:
    """Refuse what a foreign web page could send, and tell the browser to load nothing from elsewhere.

    The Host must be one of `names` or an address: another name that leads here is how DNS rebinding works. The Origin,
    which browsers send and web pages cannot change, must be the page's own.
    """

    async def guard(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await app(scope, receive, send)
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        host = hosts[0].lower() if len(hosts) == 1 else ""
        trouble = None
        if not is_own(host, names):
            trouble = f"this server is not known as {host[:80]!r}: use localhost or its address"
        elif origins and origins != [f"http://{host}"]:
            trouble = "only the playground's own page may use this server"
        if trouble is not None:
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})  # before it is accepted: status 403
            return await PlainTextResponse(f"{trouble}\n", 403)(scope, receive, send)
        rules = (
            f"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self' ws://{host};"
            " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

        async def send_with_rules(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", rules.encode("latin-1")),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cache-control", b"no-cache"),
                ]
            await send(message)

        await app(scope, receive, send_with_rules)

    return guard


def is_own(host: str, names: set[str]) -> bool:
    """Whether a Host header, in lower case, is an address or one of our names, with or without a port.

    >>> [is_own(host, {"localhost"}) for host in ("localhost:80", "127.0.0.1", "[::1]:80", "evil.example:80", "")]
    [True, True, True, False, False]
    """
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, ""
    if port and not (port.isascii() and port.isdigit()):
        return False
    if name in names:
        return True
    try:
        if name.startswith("[") and name.endswith("]"):
            ipaddress.IPv6Address(name[1:-1])
        else:
            ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return True


class ImpatientProtocol(H11Protocol):
    """Hangs up on a connection that sends no request: by itself uvicorn would keep it for ever."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(REQUEST_SECONDS, self.hang_up)

    def hang_up(self) -> None:
        # A WebSocket leaves the set when it changes its protocol.
        if self.cycle is None and self in self.connections:
            self.transport.close()


class BoundedProtocol(WebSocketsSansIOProtocol):
    """Hangs up where uvicorn by itself would keep a connection for ever, or answers to pings that nobody reads."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated:
            # The whole request has come, and its headers are too many or too long for the websockets package.
            self.handshake_complete = self.close_sent = True  # for uvicorn's shutdown, which would answer again
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.transport.close()
        elif self.transport.get_write_buffer_size() > MOST_UNREAD:
            self.transport.abort()


def listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise OSError(f"cannot listen on {host[:80]!r}: {error}; --host takes an address, such as 127.0.0.1") from None
    try:
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)};"
            " choose another --port, or 0 for any free one"
        ) from None


def new_server(host: str, limits: Limits | None = None) -> uvicorn.Server:
    """A server that is not running yet."""
    limits = limits or Limits()
    torch.set_num_threads(1)  # the nets are small: threads would only wait for each other
    config = uvicorn.Config(
        application(host, limits), http=ImpatientProtocol, ws=BoundedProtocol, ws_max_size=LONGEST_TEXT,
        ws_per_message_deflate=False, limit_concurrency=limits.connections, log_level="error", access_log=False,
        timeout_graceful_shutdown=2, server_header=False,
    )  # fmt: skip
    logging.getLogger("uvicorn.error").addFilter(worth_telling)
    return uvicorn.Server(config)


def worth_telling(record: logging.LogRecord) -> bool:
    """Whether to log this. Any page can make uvicorn complain of invalid text, with a traceback each time."""
    return not record.getMessage().startswith("Invalid UTF-8")


def serve(host: str, port: int, *, browser: bool) -> None:
    """Serve the playground until Ctrl-C; an OSError says why the port cannot be opened."""
    listener = listen(host, port)
    server = new_server(host)
    Duel(Settings()).advance(1, None)  # compiles the CPU kernel, if this is its first use
    name = f"[{host}]" if ":" in host else host
    reachable = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(name, name)
    address = f"http://{reachable}:{listener.getsockname()[1]}/"
    print(f"The playground is at {address} (Ctrl-C stops it)", flush=True)
    if not is_loopback(host):
        print("Everyone who can reach this machine can use it: there is no password", file=sys.stderr, flush=True)
    if browser:
        # The port is open: a request waits until the server takes it.
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    server.run(sockets=[listener])


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

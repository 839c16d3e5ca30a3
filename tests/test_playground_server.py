"""The playground's server and command: what it serves, refuses and survives."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from experiment_cases import error_lines, invoke

pytest.importorskip("starlette", reason="needs the playground extra")
import websockets
from playground_cases import Page, command_running, serving

from bitempered.playground import server, settings, training
from bitempered.playground.training import STEPS


@pytest.fixture(scope="module")
def address():
    with serving() as found:
        yield found


def fetch(address, path="/", method="GET", headers=(), body=None):
    connection = http.client.HTTPConnection(*address[:2], timeout=30)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def test_the_page_and_its_files_are_served(address):
    status, headers, page = fetch(address)
    assert status == 200
    assert "Bi-tempered playground" in page
    assert "default-src 'none'" in headers["content-security-policy"]
    for name, kind in (("style.css", "text/css"), ("page.js", "javascript"), ("draw.js", "javascript")):
        status, headers, _ = fetch(address, f"/{name}")
        assert status == 200
        assert kind in headers["content-type"]


def test_the_page_loads_nothing_from_elsewhere():
    for path in server.PAGE.iterdir():
        text = path.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "http:" not in text, path.name
        assert "//cdn" not in text, path.name


@pytest.mark.parametrize("path", ["/settings.py", "/../settings.py", "/%2e%2e/settings.py", "/page/", "//", "/train"])
def test_nothing_else_is_served(address, path):
    assert fetch(address, path)[0] in (400, 404)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods_are_refused(address, method):
    assert fetch(address, method=method, body=b"x" * 1000)[0] == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:{port}", 200), ("127.0.0.1:{port}", 200), ("[::1]:{port}", 200),
        ("evil.example", 403), ("evil.example:{port}", 403), ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:{port}", 403), ("localhost:x", 403), ("127.1", 403), ("", 403),
    ],
)  # fmt: skip
def test_only_own_names_and_addresses_are_hosts(address, host, status):
    assert fetch(address, headers={"Host": host.format(port=address[1])})[0] == status


ORIGINS = ["http://evil.example", "null", "http://127.0.0.1", "https://127.0.0.1:{port}", "http://localhost:{port}"]


@pytest.mark.parametrize("origin", ORIGINS)
def test_foreign_origins_are_refused(address, origin):
    origin = origin.format(port=address[1])
    assert fetch(address, headers={"Origin": origin})[0] == 403
    with pytest.raises(websockets.exceptions.InvalidStatus) as error:
        Page(address, origin=origin)
    assert error.value.response.status_code == 403


def test_the_own_origin_is_not_refused(address):
    with Page(address, origin=f"http://127.0.0.1:{address[1]}") as page:
        page.ask(settings={})
        assert page.get("frame")["step"] == 0


def test_a_session_from_start_to_end(address):
    with Page(address) as page:
        page.ask(settings={"data": "own", "points": [[-0.5, 0, 0], [0.5, 0, 1], [0.6, 0.1, 1]], "noise": "none"})
        start = page.get("start")
        assert start["points"] == [[-0.5, 0, 0, 0], [0.5, 0, 1, 1], [0.6, 0.1, 1, 1]]
        frames = page.to_the_end()
        assert [frame["step"] for frame in frames] == list(range(0, STEPS + 1, training.STEPS_PER_FRAME))
        assert [side["clean"] for side in frames[-1]["sides"]] == [1, 1]
        with pytest.raises(TimeoutError):  # the run is over
            page.get("frame", timeout=0.5)


def test_pausing_stops_the_steps_and_not_the_answers(address):
    with Page(address) as page:
        page.ask(run=False)
        page.ask(settings={"t1": 0.5, "t2": 2})
        frame = page.get("frame")
        assert (frame["step"], frame["t1"], frame["t2"]) == (0, 0.5, 2)
        page.ask(probe=[0.25, -0.5])
        frame = page.get("frame")
        assert frame["step"] == 0
        assert frame["probe"]["at"] == [0.25, -0.5]
        page.ask(run=True)
        page.ask(probe=None)
        while (frame := page.get("frame"))["step"] == 0:
            pass
        page.ask(settings={"t1": 1, "t2": 1})
        page.get("start")
        frame = page.get("frame")
        assert frame["step"] == 0
        assert frame["curves"]["loss"][0] == frame["curves"]["loss"][1]


BAD = [
    "", "{", "[]", "null", "1e999", '"text"', "{}", '{"run": 1}', '{"run": true, "probe": null}', '{"settings": 3}',
    '{"probe": [1]}', '{"probe": [9, 9]}', '{"probe": [NaN, 0]}', '{"settings": {"t1": NaN}}', '{"eval": "1"}',
    "[" * 60000, '{"settings": {"seed": ' + "9" * 5000 + "}}", '{"settings": {"points": [' * 1000, b"\x00\xff",
    '{"settings": {"data": "own", "points": [' + "[0,0,0]," * 5000 + "[0,0,1]]}}",
]  # fmt: skip


def test_bad_messages_get_an_error_and_leave_the_session_running(address):
    with Page(address) as page:
        for message in BAD:
            page.socket.send(message)
            assert len(page.get("error")) < 200
        page.ask(settings={})
        assert page.get("frame")["step"] == 0


def test_a_message_that_is_too_long_ends_its_session_only(address):
    with Page(address) as page, Page(address) as other:
        page.socket.send(" " * (settings.LONGEST_TEXT + 1))
        with pytest.raises(websockets.exceptions.ConnectionClosed) as error:
            page.get("frame")
        assert error.value.rcvd.code == 1009
        other.ask(settings={})
        assert other.get("frame")["step"] == 0


def test_a_flood_of_messages_waits(address):
    with Page(address) as page, Page(address) as other:
        for _ in range(2000):
            page.socket.send('{"settings": {}}')
        other.ask(settings={})
        started = time.monotonic()
        other.get("frame")
        # Before the end of the flood, of which the server takes so many messages a second.
        assert time.monotonic() - started < 2000 / server.Limits.messages_per_second


def limits(**changed):
    return type("Limits", (server.Limits,), changed)()


def test_one_page_too_many_is_told_so():
    with serving(limits(sessions=2)) as address, Page(address), Page(address) as second:
        with Page(address) as third:
            assert third.get("error") == "2 pages are open already: close one, then connect again"
            with pytest.raises(websockets.exceptions.ConnectionClosed) as error:
                third.socket.recv(10)
            assert error.value.rcvd.code == 1013
        second.socket.close()
        deadline = time.monotonic() + 30
        while True:  # until the server has noticed
            with Page(address) as again, suppress(websockets.exceptions.ConnectionClosed):
                again.ask(settings={})
                assert again.get("frame")["step"] == 0
                return
            assert time.monotonic() < deadline, "the page that left still counts"


def test_an_idle_page_is_told_and_ended():
    with serving(limits(idle_seconds=0.3)) as address, Page(address) as page:
        assert "not used" in page.get("error")
        with pytest.raises(websockets.exceptions.ConnectionClosed) as error:
            page.socket.recv(10)
        assert error.value.rcvd.code == 1001


class StuckPage:
    """A page that asks once and takes nothing."""

    def __init__(self):
        self.messages = [{"type": "websocket.receive", "text": '{"settings": {}}'}]

    async def receive(self):
        return self.messages.pop() if self.messages else await asyncio.Event().wait()

    async def send_text(self, text):
        await asyncio.Event().wait()


def test_a_page_that_takes_no_frames_is_ended():
    async def meet():
        page = StuckPage()
        session = server.Session(page, ThreadPoolExecutor(1), limits(send_seconds=0.2))
        await asyncio.wait_for(session.run(), 30)  # a TimeoutError if it does not end
        return page.messages

    assert asyncio.run(meet()) == []  # it had been heard


GREETING = (
    "GET /train HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{}\r\n"
)


def test_a_page_that_pings_and_does_not_read_is_hung_up_on(address):
    ping = bytes([0x89, 0x80 | 125, 0, 0, 0, 0]) + b"x" * 125
    with socket.create_connection(address[:2], timeout=30) as deaf:
        deaf.sendall(GREETING.format("").encode())
        assert deaf.recv(12) == b"HTTP/1.1 101"
        with pytest.raises(ConnectionError):
            deaf.sendall(200_000 * ping)  # 26 MB: more than the buffers of any system


@pytest.mark.parametrize("headers", ["X: " + "a" * 20_000 + "\r\n", "X: a\r\n" * 300], ids=["long", "many"])
def test_a_websocket_with_too_much_in_its_headers_is_refused(address, headers):
    """More than the websockets package takes and less than uvicorn's HTTP does: nothing else would end them."""
    with socket.create_connection(address[:2], timeout=30) as raw:
        raw.sendall(GREETING.format(headers).encode())
        assert raw.recv(12) == b"HTTP/1.1 400"
        while raw.recv(100):
            pass  # a time-out if it is not hung up on


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_ends_it_in_one_line_whatever_is_open():
    with command_running() as (process, address), socket.create_connection(address[:2]) as raw, Page(address) as page:
        page.ask(settings={})
        page.get("frame")
        page.socket.send(b"\xff", text=True)  # not UTF-8
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            page.get("error")
        raw.sendall(GREETING.format("X: a\r\n" * 300).encode())
        raw.recv(12)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == "bitempered: stopped\n"


def test_silent_connections_are_hung_up_on(monkeypatch):
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.3)
    with serving() as address, socket.create_connection(address[:2], timeout=10) as silent, Page(address) as page:
        silent.sendall(b"GET / HT")
        assert silent.recv(100) == b""
        page.ask(settings={})  # a WebSocket is not silent
        assert page.get("frame")["step"] == 0


# Fifty connections and a thousand malformed requests


def malformed(count):
    """Requests that no browser sends, each as bytes; every one differs."""
    rng = np.random.default_rng(0)
    kinds = [
        lambda k: rng.bytes(200),
        lambda k: b"GET / HTTP/9.9\r\n\r\n",
        lambda k: b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        lambda k: b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 5000,
        lambda k: b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n" + b"x" * 5000,
        lambda k: b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %d\r\n" % (k, i) for i in range(500)) + b"\r\n",
        lambda k: b"GET / HTTP/1.1\r\nHost: evil%d.example\r\n\r\n" % k,
        lambda k: b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        lambda k: b"GET /train HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        lambda k: (
            b"GET /train HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n" + rng.bytes(3000)
        ),
    ]
    return [kinds[k % len(kinds)](k) for k in range(count)]


def throw(address, request):
    """Send a request and read a little of the answer, whatever happens."""
    try:
        with socket.create_connection(address[:2], timeout=5) as raw:
            raw.sendall(request)
            raw.recv(1000)
    except OSError:
        pass


def memory_of(process):
    """Its resident memory in MiB."""
    with open(f"/proc/{process.pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory of a process from /proc")
def test_fifty_connections_and_a_thousand_malformed_requests():
    with command_running() as (process, address):
        for _ in range(2):  # what a first session makes stays
            with Page(address) as page:
                page.ask(settings={})
                page.get("frame")
        before = memory_of(process)
        pages = [Page(address) for _ in range(50)]
        for page in pages:
            with suppress(websockets.exceptions.ConnectionClosed):
                page.ask(settings={"noise": "large-margin", "level": 0.2})
        served = [first_answer(page) for page in pages]
        assert served.count("start") == server.Limits.sessions
        assert served[0] == "start"
        assert served.count("error") == 50 - server.Limits.sessions
        waits = []
        stop = threading.Event()

        def visit():
            while not stop.is_set():
                started = time.monotonic()
                assert fetch(address)[0] == 200
                waits.append(time.monotonic() - started)
                time.sleep(0.1)

        def train():
            """The first page reads all the time, as a browser does; the others do not."""
            frames = 0
            while not stop.is_set():
                frames += 1
                if pages[0].get("frame")["done"]:
                    pages[0].ask(settings={})
            return frames

        with ThreadPoolExecutor(12) as pool:
            visitor, trainee = pool.submit(visit), pool.submit(train)
            list(pool.map(lambda request: throw(address, request), malformed(1000)))
            stop.set()
            visitor.result()
            frames = trainee.result()
        for page in pages:
            page.socket.close()
        after = memory_of(process)
        print(f"{before:.0f} to {after:.0f} MiB; {frames} frames; a visitor waited {np.median(waits):.3f} s (median)")
        assert process.poll() is None
        assert frames > 1
        assert after < before + 150
        assert np.median(waits) < 2  # wide: 16 nets train at the same time
        with Page(address) as page:
            page.ask(settings={})
            assert page.get("frame")["step"] == 0


def first_answer(page):
    return next(iter(json.loads(page.socket.recv(60))))


# The command


@pytest.mark.parametrize("package", ["typer", "starlette"])
def test_a_missing_extra_is_named(package):
    code = f"""
import sys
sys.modules["{package}"] = sys.modules["{package}.applications"] = None
sys.argv = ["bitempered", "playground"]
from bitempered.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert 'this command needs more packages: pip install "torch>=2.6" "starlette>=0.40"' in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_in_use_gets_one_line(address):
    result = invoke("playground", "--no-browser", "--port", address[1])
    assert result.exit_code == 1
    [line] = error_lines(result)
    assert "Address already in use; choose another --port" in line


@pytest.mark.parametrize("host", ["no.such.host.invalid", "300.1.1.1", "x" * 300, "a..b"])
def test_a_host_that_is_none_gets_one_line(host):
    result = invoke("playground", "--no-browser", "--host", host)
    assert result.exit_code == 1
    [line] = error_lines(result)
    assert "--host takes an address" in line


def test_it_listens_on_loopback_unless_told():
    with command_running() as (_, (host, _)):
        assert host == "127.0.0.1"

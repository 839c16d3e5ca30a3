"""What tests of the playground share: a running server, and a page without a browser."""

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

websockets = pytest.importorskip("websockets.sync.client", reason="needs the playground extra")
from bitempered.playground.server import listen, new_server


@contextmanager
def serving(limits=None, port=0):
    """The address (host, port) of a server in this process."""
    door = listen("127.0.0.1", port)
    server = new_server("127.0.0.1", limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
    thread.start()
    try:
        yield door.getsockname()
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def command_running(*options):
    """The process of `bitempered playground` and its address (host, port)."""
    # A job in the background begins with SIGINT ignored, and so do its children.
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from bitempered.cli import main
main()
"""
    command = [sys.executable, "-c", code, "playground", "--no-browser", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("The playground is at http://"), line + process.stderr.read()
            found = urlsplit(line.split()[4])
            yield process, (found.hostname, found.port)
        finally:
            process.terminate()
            process.wait(20)


class Page:
    """A page that draws nothing."""

    def __init__(self, address, **options):
        host, port = address[:2]
        # Without pings: a page that does not read for a while would miss the answers.
        manners = {"open_timeout": 30, "close_timeout": 1, "ping_interval": None, "proxy": None}
        opened = websockets.connect(f"ws://{host}:{port}/train", **manners, **options)
        self.socket = opened.__enter__()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def ask(self, **message):
        self.socket.send(json.dumps(message))

    def get(self, kind, timeout=30):
        """The next message of a kind; others before it are dropped."""
        while True:
            message = json.loads(self.socket.recv(timeout))
            if kind in message:
                return message[kind]

    def to_the_end(self):
        """All frames from now to the last step."""
        frames = [self.get("frame")]
        while not frames[-1]["done"]:
            frames.append(self.get("frame"))
        return frames

"""Two processes search in one study of a PostgreSQL server, which this module starts."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna")
pytest.importorskip("psycopg2", reason="Optuna's storage needs a driver for PostgreSQL")

pytestmark = pytest.mark.slow
WORKER = """
import sys
import time
from bitempered import tune as module

module.BEAT_SECONDS, module.GRACE_SECONDS = 1.0, 20.0

def fit(t1, t2):
    print(f"{t1!r} {t2!r}", flush=True)
    if "stuck" in sys.argv:
        time.sleep(3600)
    return -((t1 - 0.7) ** 2) - (t2 - 1.4) ** 2

module.tune(fit, trials=20, storage=sys.argv[1], name="shared", seed=int(sys.argv[2]))
"""


def program(name):
    """A program of PostgreSQL, which Debian keeps out of the path."""
    found = shutil.which(name) or next(map(str, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))), None)
    if found is None:
        pytest.skip(f"PostgreSQL's {name} is not installed")
    return found


@pytest.fixture
def url(tmp_path):
    """A server of our own. It refuses to run as root, and is then the user postgres."""
    initdb, postgres = program("initdb"), program("postgres")
    user = {"user": "postgres", "cwd": "/tmp"} if os.getuid() == 0 else {}
    folder = Path(
        subprocess.check_output(["mktemp", "-d", "/tmp/bitempered-postgres-XXXXXX"], text=True, **user).strip()
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    subprocess.run(
        [initdb, "-D", folder / "data", "-U", "tester", "--auth=trust"], check=True, capture_output=True, **user
    )
    command = [postgres, "-D", folder / "data", "-p", str(port), "-c", "listen_addresses=127.0.0.1", "-k", folder]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **user)
    try:
        for line in server.stderr:  # ends if the server does
            if "ready to accept connections" in line:
                break
        assert server.poll() is None
        yield f"postgresql+psycopg2://tester@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)  # which does not wait for clients
        server.communicate(timeout=30)
        shutil.rmtree(folder)


def start(url, *arguments):
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(WORKER), url, *arguments]
    return subprocess.Popen(command, env=os.environ | path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(workers):
    said = [worker.communicate(timeout=600) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers), "\n".join(e[-1500:] for _, e in said)
    return [out.splitlines() for out, _ in said]


def of_state(url, state):
    """The settings of the study's trials in this state, as a worker prints them."""
    study = optuna.load_study(study_name="shared", storage=url)
    found = [trial.params for trial in study.trials if trial.state.name == state]
    return Counter(f"{params['t1']!r} {params['t2']!r}" for params in found)


def test_no_trial_is_lost_or_doubled(url):
    said = finish([start(url, str(seed)) for seed in (0, 1)])
    assert of_state(url, "COMPLETE") == Counter(said[0] + said[1])
    assert sum(map(len, said)) == len(optuna.load_study(study_name="shared", storage=url).trials) == 20
    assert all(said)  # both took part


def test_the_trial_of_a_killed_worker_is_made_again(url):
    killed = start(url, "2", "stuck")
    lost = killed.stdout.readline().strip()
    others = [start(url, str(seed)) for seed in (0, 1)]
    killed.kill()
    killed.communicate()
    said = finish(others)
    assert of_state(url, "FAIL") == Counter([lost])
    assert of_state(url, "COMPLETE") == Counter(said[0] + said[1])
    assert sum(map(len, said)) == 20
    assert not of_state(url, "RUNNING")

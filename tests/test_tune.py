"""bitempered.tune: finds a known best point, goes on after it is killed, and shares a study among processes."""

import math
import subprocess
import sys
import textwrap
import time
from collections import Counter

import optuna
import pytest

from bitempered import tune as module
from bitempered.tune import SPACE, OtherStudy, tune

optuna.logging.set_verbosity(optuna.logging.WARNING)


def bowl(t1, t2):
    """Its best point is (0.7, 1.4)."""
    return -((t1 - 0.7) ** 2) - (t2 - 1.4) ** 2


def numbers(study):
    return [(trial.number, trial.params) for trial in study.trials]


def test_the_best_point_is_found():
    found = tune(bowl, trials=60)
    assert found.best == pytest.approx({"t1": 0.7, "t2": 1.4}, abs=0.1)  # uniform draws come so near by chance 1 in 60
    assert found.score == bowl(**found.best) == max(trial.value for trial in found.study.trials)
    assert len(found.study.trials) == 60


def test_fit_gets_the_settings_that_it_names():
    seen = []

    def fit(t2, schedule, *, momentum, verbose=False):
        seen.append((t2, schedule, momentum))
        return t2

    found = tune(fit, trials=30, space={"momentum": [0.0, 0.9], "t2": (1.5, 2.0)})
    assert set(found.best) == {"t2", "schedule", "momentum"}
    assert all(1.5 <= t2 <= 2.0 and momentum in (0.0, 0.9) for t2, _, momentum in seen)
    schedules = [schedule for _, schedule, _ in seen]
    assert None in schedules
    assert all(0 <= begin <= finish <= 1 for begin, finish in filter(None, schedules))
    assert any(schedules)


def test_a_name_of_a_schedule_s_part_is_free_without_one():
    seen = []
    tune(lambda begin: seen.append(begin) or 0.0, trials=4, space={"begin": (5.0, 6.0)})
    assert all(5 <= begin <= 6 for begin in seen)


def test_fit_with_any_keywords_gets_the_space():
    assert set(tune(lambda **settings: settings["q"], trials=2, space={"q": (0.0, 1.0)}).best) == {"q"}


def test_the_first_settings_come_first():
    first = [{"t1": 1.0, "t2": 1.0, "schedule": None}, {"t1": 0.0, "t2": 1.5, "schedule": (0.1, 0.5)}]
    seen = []
    tune(lambda t1, t2, schedule: seen.append({"t1": t1, "t2": t2, "schedule": schedule}) or 0, trials=3, first=first)
    assert seen[0] == first[0]
    assert seen[1] == first[1]
    assert seen[2] not in first


def test_pruned_trials_count_and_never_win():
    """A trial that looks worse than the median stops; one that would have been the best in the end is not."""
    ended = []

    def fit(t1, report):
        for step in range(3):
            report(step, -t1)
        ended.append(t1)
        return -t1

    found = tune(fit, trials=30)
    states = Counter(trial.state.name for trial in found.study.trials)
    assert states["PRUNED"] > 0
    assert states["COMPLETE"] == len(ended) == 30 - states["PRUNED"]
    assert found.best["t1"] == min(ended)
    assert len(tune(fit, trials=10, prune=False).study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))) == 10


def test_a_score_that_is_not_a_number_counts_as_the_worst():
    found = tune(lambda t1: math.nan if t1 > 0.5 else t1, trials=20)
    assert found.best["t1"] <= 0.5
    assert len(found.study.trials) == 20
    with pytest.raises(ValueError, match="none of 3 trials gave a score that is a number"):
        tune(lambda t1: math.nan, trials=3)


def test_progress():
    told = []
    tune(bowl, trials=3, progress=lambda *now: told.append(now))
    assert [now[:2] for now in told] == [(1, 3), (2, 3), (3, 3)]
    assert all(text.startswith("trial ") and "best" in text for _, _, text in told)


def test_a_study_goes_on_as_if_it_had_not_stopped(tmp_path):
    """Ctrl-C in the fourth trial, and an error in the sixth; the trials are those of a study without them."""
    calls = []

    def fit(t1, t2):
        calls.append(t1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        if len(calls) == 7:
            raise ZeroDivisionError
        return bowl(t1, t2)

    for exception in (KeyboardInterrupt, ZeroDivisionError):
        with pytest.raises(exception):
            tune(fit, trials=12, storage=tmp_path / "study.db", seed=1)
    found = tune(fit, trials=12, storage=f"sqlite:///{tmp_path / 'study.db'}", seed=1)
    done = [trial.params for trial in found.study.trials if trial.state.name == "COMPLETE"]
    assert done == [trial.params for trial in tune(bowl, trials=12, seed=1).study.trials]
    assert len(calls) == 14
    tune(fit, trials=12, storage=tmp_path / "study.db", seed=1)
    assert len(calls) == 14  # a finished study is only read
    assert len(tune(fit, trials=13, storage=tmp_path / "study.db").study.trials) == 15


def test_a_study_of_something_else_is_refused(tmp_path):
    storage = tmp_path / "study.db"
    tune(bowl, trials=2, storage=storage, about={"data": "digits"})
    with pytest.raises(OtherStudy, match=r"'bitempered' was made with other about: data was 'digits', not 'mnist'"):
        tune(bowl, trials=2, storage=storage, about={"data": "mnist"})
    with pytest.raises(OtherStudy, match=r"other ranges: t1 was \[0.0, 1.0\], not \[0.0, 0.5\]; give another name"):
        tune(bowl, trials=2, storage=storage, about={"data": "digits"}, space={"t1": (0.0, 0.5)})
    assert len(tune(bowl, trials=2, storage=storage, name="other").study.trials) == 2


def test_every_name_of_a_sqlite_file_has_the_same_lock(tmp_path):
    file = tmp_path / "study.db"
    urls = [f"sqlite:///{file}", f"sqlite+pysqlite:///{file}", f"sqlite:///{file}?timeout=5"]
    for number, name in enumerate([file, *urls], start=1):
        assert len(tune(bowl, trials=number, storage=name).study.trials) == number
    assert sorted(path.name for path in tmp_path.iterdir()) == ["study.db", "study.db.lock"]


@pytest.mark.parametrize("before", ["", "sqlite:///"])
def test_a_storage_in_a_missing_folder_is_named(before, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cannot store a study in .*study\.db: there is no folder .*none"):
        tune(bowl, trials=1, storage=f"{before}{tmp_path}/none/study.db")


@pytest.mark.parametrize("name", ["what?mode=ro", "{name}", "50%3F #1", "a b@c:d"])  # special in a URL or a template
def test_a_storage_may_have_any_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, storage in enumerate([name, tmp_path / name], start=1):
        assert len(tune(bowl, trials=number, storage=storage).study.trials) == number
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, f"{name}.lock"]
    assert len(tune(bowl, trials=1, storage="").study.trials) == 1  # in memory
    assert len(list(tmp_path.iterdir())) == 2


BAD = {
    "trials": ({"trials": 0}, ValueError, "trials must be a whole number of at least 1, got 0"),
    "half a trial": ({"trials": 2.5}, ValueError, "trials must be a whole number of at least 1, got 2.5"),
    "endless": ({"space": {"t2": (1.0, math.inf)}}, ValueError, r"the range of t2 must be \(low, high\)"),
    "finish before begin": (
        {"fit": lambda schedule: 0, "first": [{"schedule": (0.3, 0.2)}]},
        ValueError,
        r"first has schedule = \(0.3, 0.2\), which must be \(begin, finish\)",
    ),
    "late begin": (
        {"fit": lambda schedule: 0, "first": [{"schedule": (0.6, 0.9)}]},
        ValueError,
        "begin in the first half of its range, 0 to 1, and last at most half of it",
    ),
    "no range": (
        {"fit": lambda t1, depth: 0},
        ValueError,
        "fit takes 'depth', which has no range; give one with space=",
    ),
    "nothing": ({"fit": lambda: 0}, ValueError, "fit takes no setting to search; name some of: t1, t2, schedule"),
    "surplus": ({"space": {"depth": (1, 2)}}, ValueError, "fit does not take depth; it takes: t1, t2"),
    "upside down": ({"space": {"t1": (1.0, 0.0)}}, ValueError, r"the range of t1 must be \(low, high\)"),
    "log of 0": ({"space": {"t2": (0.0, 1.0, "log")}}, ValueError, "with low > 0"),
    "words": ({"space": {"t1": "all"}}, ValueError, "got 'all'"),
    "t1 above t2": ({"space": {"t1": (0.0, 1.5)}}, ValueError, "t1 must not exceed t2"),
    "first": ({"first": [{"t1": 1.0}]}, ValueError, "first must hold settings with the names t1, t2; got t1"),
    "first outside": ({"first": [{"t1": 1.0, "t2": 9.0}]}, ValueError, "first has t2 = 9.0, which is not in its range"),
    "one first": ({"first": {"t1": 1.0, "t2": 1.0}}, TypeError, "first must be a list of settings"),
    "first without a number": (
        {"first": [{"t1": None, "t2": 1.0}]},
        ValueError,
        "first has t1 = None, which is not in",
    ),
    "t1 in words": ({"space": {"t1": ["a"]}}, ValueError, r"the range of t1 must be .*; got \['a'\]"),
    "a name that is taken": (
        {"fit": lambda schedule, begin: 0, "space": {"begin": (5.0, 6.0)}},
        ValueError,
        "space must not hold 'begin', which has a meaning of its own; choose another name",
    ),
    "report": ({"fit": lambda t1, report: 0, "space": {"report": (0, 1)}}, ValueError, "must not hold 'report'"),
    "no score": ({"fit": lambda t1: None}, TypeError, "fit must return a number, its score; got NoneType"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    options, exception, message = BAD[case]
    with pytest.raises(exception, match=message):
        tune(**{"fit": bowl, "trials": 2} | options)


def test_missing_optuna_is_said_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModuleNotFoundError, match=r'^bitempered.tune needs Optuna: pip install "optuna>=3"$'):
        tune(bowl, trials=1)


def test_ranges_of_temperatures_are_valid():
    assert SPACE["t1"][1] <= SPACE["t2"][0]


# Processes. A trial writes a line when it begins and when it ends.
PROGRAM = """
import sys, time
import optuna
from bitempered import tune as module
optuna.logging.set_verbosity(optuna.logging.WARNING)
module.BEAT_SECONDS, module.LOOK_SECONDS = 0.2, 0.05
module.GRACE_SECONDS = 10.0  # a living process may stall for seconds
folder, trials, seconds, stuck_in = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
begun = 0

def fit(t1, t2):
    global begun
    begun += 1
    print("begin", t1, t2, flush=True)
    time.sleep(600 if begun == stuck_in else seconds)
    print("end", t1, t2, flush=True)
    return -((t1 - 0.7) ** 2) - (t2 - 1.4) ** 2

found = module.tune(fit, trials=trials, storage=folder + "/study.db")
print("best", found.score, flush=True)
"""


def start(folder, trials, seconds, stuck_in=0):
    """Start a process that tunes; it does not come back from the trial `stuck_in`, counted from 1."""
    arguments = [str(argument) for argument in (folder, trials, seconds, stuck_in)]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments], stdout=subprocess.PIPE, text=True
    )


def load(folder):
    return optuna.load_study(study_name="bitempered", storage=f"sqlite:///{folder / 'study.db'}")


@pytest.mark.slow
def test_a_study_killed_in_the_middle_goes_on(tmp_path):
    process = start(tmp_path, 8, 0.0, stuck_in=4)
    begun = 0
    while begun < 4:  # the fourth trial is running
        begun += process.stdout.readline().startswith("begin")
    process.kill()
    process.wait()
    process.stdout.close()
    before = load(tmp_path).trials
    assert [trial.state.name for trial in before] == ["COMPLETE"] * 3 + ["RUNNING"]
    again = start(tmp_path, 8, 0.0)
    lines = again.communicate(timeout=120)[0].splitlines()
    assert sum(line.startswith("end") for line in lines) == 5
    after = load(tmp_path).trials
    assert Counter(trial.state.name for trial in after) == {"COMPLETE": 8, "FAIL": 1}
    assert after[3].state.name == "FAIL"
    assert [(trial.params, trial.value) for trial in after[:3]] == [(trial.params, trial.value) for trial in before[:3]]


@pytest.mark.slow
def test_four_processes_share_a_study(tmp_path):
    """Exactly as many trials as asked for, none twice, each process some, and all see the same best one."""
    processes = [start(tmp_path, 24, 0.3) for _ in range(4)]
    outputs = [process.communicate(timeout=300)[0].splitlines() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    study = load(tmp_path)
    assert [trial.number for trial in study.trials] == list(range(24))
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    ran = [line for lines in outputs for line in lines if line.startswith("end")]
    assert len(ran) == len(set(ran)) == 24
    stored = {f"end {trial.params['t1']} {trial.params['t2']}" for trial in study.trials}
    assert stored == set(ran)
    assert {lines[-1] for lines in outputs} == {f"best {study.best_value}"}


@pytest.mark.slow
def test_one_of_four_processes_is_killed(tmp_path):
    processes = [start(tmp_path, 12, 0.5, stuck_in=1), *(start(tmp_path, 12, 0.5) for _ in range(3))]
    while not processes[0].stdout.readline().startswith("begin"):
        pass
    processes[0].kill()
    processes[0].communicate()
    for process in processes[1:]:
        process.communicate(timeout=300)
        assert process.returncode == 0
    states = Counter(trial.state.name for trial in load(tmp_path).trials)
    assert states == {"COMPLETE": 12, "FAIL": 1}


def test_a_trial_that_fails_leaves_its_place_and_settings_to_the_next(tmp_path, monkeypatch):
    """As if four processes had been killed; no trial is lost, none is made twice."""
    first = [{"t1": 0.1}, {"t1": 0.2}, {"t1": 0.3}]
    search = module._Search(
        optuna, {"t1": (0.0, 1.0)}, 0, 6, [dict(one) for one in first], *module._stored(optuna, tmp_path / "study.db")
    )
    search.open("bitempered", False, {})
    dead, *others = [search.ask() for _ in range(4)]
    assert [dead.params, *(trial.params for trial in others[:2])] == first
    monkeypatch.setattr(module, "GRACE_SECONDS", -1.0)  # all four count as dead
    search.fail_dead_trials()
    monkeypatch.undo()
    # Killed after a trial was put in the queue, before it was asked for:
    search.study.enqueue_trial(first[0], user_attrs={"place": 0})
    again = [search.ask() for _ in range(6)]
    assert [trial.params for trial in again[:3]] == first
    assert [trial.user_attrs["place"] for trial in again] == list(range(6))
    assert again[3].params == others[2].params  # the seed of its place
    assert len({trial.params["t1"] for trial in again}) == 6


def test_a_running_trial_shows_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    seen = []

    def fit(t1):
        deadline = time.monotonic() + 60
        while len(set(seen)) < 2 and time.monotonic() < deadline:
            seen.append(load(tmp_path).trials[0].user_attrs["seen"])
        return t1

    tune(fit, trials=1, storage=tmp_path / "study.db")
    assert seen[-1] > seen[0]

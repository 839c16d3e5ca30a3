"""Search t1, t2, schedule, rate, decay and smoothing together, by Optuna. Importing this needs no framework.

>>> def fit(t1, t2):  # train with these temperatures, return the accuracy on rows that were set aside
...     return -((t1 - 0.7) ** 2) - (t2 - 1.4) ** 2
>>> from bitempered.tune import tune
>>> found = tune(fit, trials=30)
>>> round(found.best["t1"], 1), found.score > -0.1
(0.7, True)

With a `storage` the study is kept. A second call continues it, even if the first was killed, and any number of
processes can share it: start the same program several times.
"""

import fcntl
import inspect
import json
import math
import sqlite3
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, cast

__all__ = ["SPACE", "OtherStudy", "Tuned", "tune"]

Progress = Callable[[int, int, str], None]  # trials done, trials in all, what happened

# The range of each setting: (low, high), (low, high, "log"), or a list of choices. That of a schedule is the part of
# the run in which the temperatures may move.
SPACE: dict[str, Any] = {
    "t1": (0.0, 1.0),
    "t2": (1.0, 4.0, "log"),
    "schedule": (0.0, 1.0),
    "rate": (1e-5, 1e-1, "log"),
    "decay": (1e-6, 1e-1, "log"),
    "smoothing": (0.0, 0.2),
}
BEAT_SECONDS = 10.0  # between two signs of life of a running trial
GRACE_SECONDS = 60.0  # without one, after which its process counts as dead
LOOK_SECONDS = 0.5  # between two looks at trials of other processes
BUSY_SECONDS = 60  # to wait for a locked SQLite file


class OtherStudy(ValueError):
    """A study of this name is in the storage, with other ranges or another `about`."""


@dataclass(frozen=True)
class Tuned:
    """The best settings by name, as `fit` takes them; their score; and Optuna's study with all trials."""

    best: dict[str, Any]
    score: float
    study: Any


def tune(
    fit: Callable[..., float],
    *,
    trials: int,
    storage: str | Path | None = None,
    name: str = "bitempered",
    space: Mapping[str, Any] | None = None,
    first: Iterable[Mapping[str, Any]] = (),
    seed: int = 0,
    prune: bool = True,
    about: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Tuned:
    """Search for the settings with which `fit` returns the highest score.

    Args:
        fit: takes settings by name and returns a score; higher is better. It gets the settings that its signature
            names: any of t1, t2, schedule, rate, decay, smoothing and the names in `space`. A schedule is None, or
            (begin, finish) as fractions of the run: multiply them by the number of steps or epochs for
            `schedules.anneal`.
            If it also takes `report`, it can call report(step, score) during training, which stops trials whose score
            is below the median of the others at that step. A score that is not a number counts as the worst.
        trials: the number of trials in the study, pruned ones and those of earlier calls and other processes included.
        storage: a file for SQLite, or a URL of Optuna (such as postgresql://...); None keeps the study in memory. With
            a database other than SQLite, processes that share a study may run a few extra trials.
        name: of the study in its storage.
        space: ranges that replace those of `SPACE` or are added: (low, high), (low, high, "log") or a list of choices.
        first: settings to begin with. A search that begins with the defaults does not end below them.
        seed: of the search. A single process makes the same trials for a seed, even if it was interrupted.
        prune: whether `report` stops trials.
        about: what else the scores depend on, as JSON values. A study made with a different `about` is refused.
        progress: called after each trial with the number of finished trials, their total, and a text.
    """
    optuna = _optuna()
    if not isinstance(trials, Integral) or trials < 1:
        raise ValueError(f"trials must be a whole number of at least 1, got {trials!r}")
    ranges, reports = _ranges(fit, space or {})
    if isinstance(first, Mapping):
        raise TypeError("first must be a list of settings, such as [{...}]; got one setting")
    begin_with = [_parameters(settings, ranges) for settings in first]
    search = _Search(optuna, ranges, seed, trials, begin_with, *_stored(optuna, storage))
    search.open(name, prune, json.loads(json.dumps({"ranges": ranges, "about": dict(about or {})})))
    while (trial := search.ask()) is not None:
        search.run(trial, fit, **({"report": _reporter(optuna, trial, prune)} if reports else {}))
        if progress is not None:
            progress(*search.progress(trial.number))
    return search.result()


class _Search:
    """A study, shared by processes: each takes the next trial under a lock, and replaces those whose process died."""

    def __init__(
        self,
        optuna: Any,
        ranges: dict[str, Any],
        seed: int,
        trials: int,
        first: list[dict[str, Any]],
        storage: Any,
        lock: Callable[[], Any],
    ) -> None:
        self.optuna, self.ranges, self.seed, self.trials, self.first = optuna, ranges, seed, trials, first
        self.storage, self.lock = storage, lock
        state = optuna.trial.TrialState
        self.done, self.begun = (state.COMPLETE, state.PRUNED), (state.COMPLETE, state.PRUNED, state.RUNNING)

    def open(self, name: str, prune: bool, about: dict[str, Any]) -> None:
        pruner = self.optuna.pruners.MedianPruner() if prune else self.optuna.pruners.NopPruner()
        with self.lock():
            self.study = self.optuna.create_study(
                storage=None if self.storage is None else self.storage(), study_name=name, pruner=pruner,
                direction="maximize", load_if_exists=True,
            )  # fmt: skip
            kept = self.study.user_attrs.get("bitempered")
            if kept is None:
                self.study.set_user_attr("bitempered", about)
            elif kept != about:
                differs = [part for part in about if kept.get(part) != about[part]]
                raise OtherStudy(
                    f"the study {name!r} was made with other {' and '.join(differs)}: {_difference(kept, about)}; give"
                    " another name or storage"
                )

    def ask(self) -> Any:
        """Return the next trial with its settings, or None if there are enough; wait for those of other processes."""
        while True:
            with self.lock():
                self.fail_dead_trials()
                known = self.study.get_trials(deepcopy=False, states=self.begun)
                if len(known) < self.trials:
                    # A trial that failed leaves its place, with its seed, to the next.
                    taken = {trial.user_attrs.get("place", trial.number) for trial in known}
                    return self.start(next(place for place in range(self.trials) if place not in taken))
                if all(trial.state in self.done for trial in known):
                    return None
            time.sleep(LOOK_SECONDS)

    def fail_dead_trials(self) -> None:
        """Fail the trials of dead processes."""
        for trial in self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState.RUNNING,)):
            seen = trial.user_attrs.get("seen", trial.datetime_start.timestamp())
            if time.time() - seen > GRACE_SECONDS:
                self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL, skip_if_finished=True)

    def start(self, place: int) -> Any:
        """Ask for the trial at a place; all its settings are drawn at once, so that others see them when they ask."""
        # The trial of a process that was killed before it asked is still waiting: take it first.
        waiting = self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState.WAITING,))
        if waiting:
            place = waiting[0].user_attrs.get("place", place)
        else:
            settings = self.first[place] if place < len(self.first) else {}
            self.study.enqueue_trial(settings, user_attrs={"place": place})
        # A seed for each place: processes that share a study do not draw the same, nor does one that goes on with it.
        seed = (self.seed * 1_000_003 + place) % 2**32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
            # The settings depend on each other, so they are drawn jointly; begin and length only exist with a schedule.
            self.study.sampler = self.optuna.samplers.TPESampler(
                seed=seed, multivariate=True, group=True, constant_liar=True
            )
        trial = self.study.ask()
        trial.set_user_attr("seen", time.time())
        _suggest(trial, self.ranges)
        return trial

    def run(self, trial: Any, fit: Callable[..., float], **more: Any) -> None:
        """Call `fit` and store its score; end the trial too if it is pruned or interrupted."""
        state = self.optuna.trial.TrialState
        score: float | None = None
        try:
            with self.alive(trial):
                score = _number(fit(**_settings(trial.params, self.ranges), **more))
        except self.optuna.TrialPruned:
            pass
        except BaseException:
            self.study.tell(trial, state=state.FAIL, skip_if_finished=True)
            raise
        # The trial has ended already if this process was taken for dead and another one has replaced it.
        if score is None or score != score:
            self.study.tell(trial, state=state.PRUNED, skip_if_finished=True)
        else:
            self.study.tell(trial, score, skip_if_finished=True)

    @contextmanager
    def alive(self, trial: Any) -> Iterator[None]:
        """Show signs of life in a storage that others can see."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT_SECONDS):
                with suppress(self.optuna.exceptions.OptunaError):  # the storage is busy, or the trial was replaced
                    trial.set_user_attr("seen", time.time())

        thread = threading.Thread(target=beat, daemon=True)
        if self.storage is not None:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if self.storage is not None:
                thread.join()

    def progress(self, number: int) -> tuple[int, int, str]:
        known = {trial.number: trial for trial in self.study.get_trials(deepcopy=False, states=self.done)}
        complete = {key: trial.value for key, trial in known.items() if trial.state is self.done[0]}
        said = f"{complete[number]:.4f}" if number in complete else "pruned"
        best = f", best {max(complete.values()):.4f}" if complete else ""
        return min(len(known), self.trials), self.trials, f"trial {number}: {said}{best}"

    def result(self) -> Tuned:
        complete = self.study.get_trials(deepcopy=False, states=self.done[:1])
        if not complete:
            raise ValueError(f"none of {self.trials} trials gave a score that is a number")
        best = max(complete, key=lambda trial: trial.value)  # the first if tied
        return Tuned(_settings(best.params, self.ranges), best.value, self.study)


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as missing:
        if missing.name != "optuna":
            raise
        raise ModuleNotFoundError('bitempered.tune needs Optuna: pip install "optuna>=3"', name="optuna") from None
    return optuna


def _stored(optuna: Any, storage: str | Path | None) -> tuple[Callable[[], Any] | None, Callable[[], Any]]:
    """Return what opens a storage, and the lock under which a process takes a trial."""
    if storage is None:
        return None, nullcontext
    from sqlalchemy.engine import make_url

    plain = "://" not in str(storage)
    url = "sqlite:///study.db" if plain else str(storage)  # of a plain name only the kind
    lock: Callable[[], Any] = nullcontext
    options: dict[str, Any] = {}
    if url.startswith("postgresql"):
        lock = _lock_of_server(url)
    elif url.startswith("sqlite"):
        file = str(storage) if plain else make_url(url).database
        if file in (None, "", ":memory:"):
            url = "sqlite://"
        elif not Path(file).parent.is_dir():
            raise FileNotFoundError(f"cannot store a study in {file}: there is no folder {Path(file).parent}")
        else:
            lock = _lock_of_file(Path(f"{file}.lock"))
            options = {"connect_args": {"timeout": BUSY_SECONDS}}
            if plain:  # in a URL, ?, % and braces would mean something else
                options = {"creator": lambda: sqlite3.connect(str(storage), BUSY_SECONDS, check_same_thread=False)}
    return (lambda: optuna.storages.RDBStorage(url, engine_kwargs=options)), lock


def _lock_of_file(path: Path) -> Callable[[], Any]:
    """A lock for SQLite: Optuna reads and writes a trial's state in two steps, and another process may write between.

    It ends with the process, even if that is killed.
    """

    @contextmanager
    def lock() -> Iterator[None]:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    return lock


def _lock_of_server(url: str) -> Callable[[], Any]:
    """A lock that PostgreSQL keeps for all machines, and drops with the connection of a process that is killed.

    Without it two processes would both make the tables of a new database, or both take the last trial.
    """
    import sqlalchemy

    engine, number = sqlalchemy.create_engine(url), zlib.crc32(b"bitempered.tune")

    @contextmanager
    def lock() -> Iterator[None]:
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text(f"SELECT pg_advisory_lock({number})"))
            try:
                yield
            finally:
                connection.execute(sqlalchemy.text(f"SELECT pg_advisory_unlock({number})"))

    return lock


def _ranges(fit: Callable[..., float], space: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the range of each setting that `fit` takes, and whether it takes `report`."""
    known, wanted = SPACE | dict(space), dict(inspect.signature(fit).parameters)
    kinds = inspect.Parameter
    named = [name for name, one in wanted.items() if one.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    if any(one.kind is kinds.VAR_KEYWORD for one in wanted.values()):
        named += [name for name in space if name not in named]
    elif surplus := [name for name in space if name not in named]:
        raise ValueError(f"fit does not take {', '.join(surplus)}; it takes: {', '.join(named) or 'nothing'}")
    for name, one in wanted.items():
        if name in named and name not in known and name != "report" and one.default is kinds.empty:
            raise ValueError(f"fit takes {name!r}, which has no range; give one with space={{{name!r}: (low, high)}}")
    ranges = {name: _checked(name, known[name]) for name in known if name in named}
    taken = {"report", *(("annealed", "begin", "length") if "schedule" in ranges else ())}
    if names := taken & ranges.keys():
        raise ValueError(f"space must not hold {min(names)!r}, which has a meaning of its own; choose another name")
    if not ranges:
        raise ValueError(f"fit takes no setting to search; name some of: {', '.join(known)}")
    if {"t1", "t2"} <= ranges.keys() and _largest(ranges["t1"]) > _smallest(ranges["t2"]):
        raise ValueError(
            f"t1 must not exceed t2: the range of t1, {ranges['t1']}, ends above that of t2, {ranges['t2']}"
        )
    return ranges, "report" in named


def _checked(name: str, given: Any) -> Any:
    if isinstance(given, list):
        kinds = (int, float) if name in ("t1", "t2") else (str, int, float, bool, type(None))
        if given and name != "schedule" and all(isinstance(one, kinds) for one in given):
            return given
    elif isinstance(given, tuple) and len(given) in (2, 3) and given[2:] in ((), ("log",)):
        low, high = given[:2]
        numbers = all(isinstance(one, int | float) and math.isfinite(one) for one in (low, high))
        if numbers and low <= high and (len(given) < 3 or low > 0):
            return given
    raise ValueError(
        f'the range of {name} must be (low, high), (low, high, "log") with low > 0, or a list of choices; got {given!r}'
    )


def _smallest(given: Any) -> float:
    return cast(float, min(given) if isinstance(given, list) else given[0])


def _largest(given: Any) -> float:
    return cast(float, max(given) if isinstance(given, list) else given[1])


def _suggest(trial: Any, ranges: dict[str, Any]) -> None:
    """Draw a parameter of Optuna for each setting; a schedule has up to three."""

    def number(name: str, low: float, high: float, log: str | None = None) -> None:
        trial.suggest_float(name, low, high, log=log == "log")

    for name, given in ranges.items():
        if isinstance(given, list):
            trial.suggest_categorical(name, given)
        elif name != "schedule":
            number(name, *given)
        elif trial.suggest_categorical("annealed", [False, True]):
            half = (given[1] - given[0]) / 2
            number("begin", given[0], given[0] + half)
            number("length", 0.0, half)


def _settings(parameters: Mapping[str, Any], ranges: dict[str, Any]) -> dict[str, Any]:
    """Return settings as `fit` takes them, of the parameters of a trial."""
    found = {name: parameters[name] for name in ranges if name != "schedule"}
    if "schedule" in ranges:
        begin, length = parameters.get("begin", 0.0), parameters.get("length", 0.0)
        found["schedule"] = (begin, begin + length) if parameters["annealed"] else None
    return found


def _parameters(settings: Mapping[str, Any], ranges: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a trial with these settings, the inverse of `_settings`."""
    if settings.keys() != ranges.keys():
        raise ValueError(f"first must hold settings with the names {', '.join(ranges)}; got {', '.join(settings)}")
    found = {name: value for name, value in settings.items() if name != "schedule"}
    for name, value in found.items():
        given = ranges[name]
        in_range = isinstance(given, tuple) and isinstance(value, Real) and given[0] <= value <= given[1]
        if not in_range and not (isinstance(given, list) and value in given):
            raise ValueError(f"first has {name} = {value!r}, which is not in its range, {given!r}")
    schedule = settings.get("schedule")
    if "schedule" in settings:
        found["annealed"] = schedule is not None
    if schedule is not None:
        low, high = ranges["schedule"][:2]
        if not (low <= schedule[0] <= (low + high) / 2 and 0 <= schedule[1] - schedule[0] <= (high - low) / 2):
            raise ValueError(
                f"first has schedule = {schedule!r}, which must be (begin, finish), begin in the first half of its "
                f"range, {low:g} to {high:g}, and last at most half of it"
            )
        found |= {"begin": schedule[0], "length": schedule[1] - schedule[0]}
    return found


def _reporter(optuna: Any, trial: Any, prune: bool) -> Callable[[int, float], None]:
    def report(step: int, score: float) -> None:
        if prune:
            trial.report(float(score), step)
            if trial.should_prune():
                raise optuna.TrialPruned

    return report


def _number(score: Any) -> float:
    try:
        return float(score)
    except (TypeError, ValueError):
        raise TypeError(f"fit must return a number, its score; got {type(score).__name__}") from None


def _difference(kept: Any, wanted: Any) -> str:
    """Name the first values in which two nested mappings differ."""
    for name in [*wanted, *kept]:
        before, after = kept.get(name), wanted.get(name)
        if before != after:
            if isinstance(before, dict) and isinstance(after, dict):
                return _difference(before, after)
            return f"{name} was {before!r}, not {after!r}"
    return ""

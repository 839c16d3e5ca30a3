"""A local Dask cluster of two workers: boosted models equal those of one process, and cells are made once.

Features have five values, all of which occur on both workers, so that both libraries' histograms are exact.
"""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("dask.distributed", reason="the cluster of these tests is Dask's")
pytest.importorskip("dask.dataframe", reason="XGBoost's and LightGBM's Dask interfaces import it")

import dask.array as da
from dask.distributed import Client, LocalCluster
from sklearn.datasets import load_digits

from bitempered.boosting import lightgbm_objective, xgboost_objective
from bitempered.experiments.files import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what Dask and the libraries say of themselves
PIXELS, Y = load_digits(return_X_y=True)
LEVELS = np.minimum(PIXELS // 4, 4)
HALF = 900
# LightGBM's workers each look for the values of some features, in their own rows.
X = LEVELS[:, [len(np.unique(c[:HALF])) == len(np.unique(c[HALF:])) == len(np.unique(c)) for c in LEVELS.T]]
TREES = 6


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as connected,
    ):
        yield connected


def halves():
    """The rows in two chunks, one for each worker."""
    return da.from_array(X, chunks=(HALF, X.shape[1])), da.from_array(Y, chunks=HALF)


def test_xgboost(client):
    xgb = pytest.importorskip("xgboost")
    from xgboost import dask as over_dask

    settings = {"num_class": 10, "max_depth": 4, "tree_method": "hist", "disable_default_eval_metric": 1, "nthread": 1}
    objective = xgboost_objective(0.8, 1.2, 10)
    matrix = over_dask.DaskDMatrix(client, *halves())
    together = over_dask.train(client, settings, matrix, num_boost_round=TREES, obj=objective)["booster"]
    alone = xgb.train(settings, xgb.DMatrix(X, Y), TREES, obj=objective)
    scores = [model.predict(xgb.DMatrix(X), output_margin=True) for model in (together, alone)]
    assert np.ptp(scores[1]) > 1
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-5)  # sums of float32 gradients in another order


def test_lightgbm(client):
    """Small trees without a limit on the rows of a leaf, which LightGBM guesses from sums of h.

    In larger ones two splits tie, and rounding decides, with LightGBM's own objective as well.
    """
    lgb = pytest.importorskip("lightgbm")
    settings = {
        "objective": lightgbm_objective(0.8, 1.2, 10), "n_estimators": 4, "num_leaves": 4, "min_child_samples": 1,
        "n_jobs": 1, "verbose": -1, "min_child_weight": 0.0, "min_data_in_bin": 1, "enable_bundle": False,
    }  # fmt: skip
    together = lgb.DaskLGBMClassifier(client=client, tree_learner="data", **settings).fit(*halves())
    alone = lgb.LGBMClassifier(**settings).fit(X, Y)
    scores = [model.booster_.predict(X, raw_score=True) for model in (together, alone)]
    assert np.ptp(scores[1]) > 0.5
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-5)


def test_workers_share_the_cells_of_a_comparison(client, tmp_path):
    command = [sys.executable, "-m", "bitempered", "compare", "--out", str(tmp_path), "--losses"]
    command += [
        "logistic,bi-tempered:0.2:1.2",
        "--rates",
        "0.0003",
        "--noise",
        "0,0.4",
        "--seeds",
        "2",
        "--epochs",
        "1",
    ]
    done = client.run(subprocess.run, command, capture_output=True, text=True)
    assert [result.returncode for result in done.values()] == [0, 0], done
    made = [(row["loss"], row["noise"], row["seed"]) for row in read_rows(tmp_path / "compare.jsonl")]
    assert len(made) == len(set(made)) == 8

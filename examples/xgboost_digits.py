"""XGBoost: the bi-tempered loss as objective and metric, on digits of which 40 % are labelled wrong.

pip install xgboost scikit-learn
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from bitempered import boosting
from bitempered.boosting import xgboost_metric, xgboost_objective
from bitempered.noise import symmetric
from bitempered.numpy import tempered_softmax

try:
    import xgboost as xgb
except ImportError:
    raise SystemExit("this example needs XGBoost: pip install xgboost") from None

T1, T2 = 0.8, 1.2


def main(rounds: int = 50) -> tuple[np.ndarray, np.ndarray, float]:
    pixels, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(pixels, labels, test_size=500, random_state=0)
    y = symmetric(y, 0.4, rng=np.random.default_rng(0), num_classes=10)
    x, x_stop, y, y_stop = train_test_split(x, y, test_size=300, random_state=0)  # as noisy as the rest

    params = {"max_depth": 3, "eta": 0.1, "subsample": 0.5, "colsample_bynode": 0.2, "nthread": 1}
    # Second derivatives are 10^(1 + t1 - 2 t2) times those of the logistic loss: so is what is compared with them.
    scale = 10 ** (1 + T1 - 2 * T2)
    params |= {"lambda": 10 * scale, "min_child_weight": scale}
    booster = xgb.train(
        params | {"num_class": 10},
        xgb.DMatrix(x, y),
        rounds,
        obj=xgboost_objective(T1, T2, 10),
        custom_metric=xgboost_metric(T1, T2, 10),
        evals=[(xgb.DMatrix(x_stop, y_stop), "stop")],
        early_stopping_rounds=10,
        verbose_eval=False,
    )
    # Without output_margin come the probabilities of the ordinary softmax, which are not the model's.
    best = (0, booster.best_iteration + 1)
    scores = booster.predict(xgb.DMatrix(x_test), output_margin=True, iteration_range=best)
    probabilities = tempered_softmax(scores, T2)
    accuracy = float((probabilities.argmax(1) == y_test).mean())
    print(f"accuracy on clean test labels {accuracy:.1%} after {best[1]} rounds")

    # The same through scikit-learn. With our subclass of XGBoost's classifier predict_proba is the tempered softmax.
    objective = xgboost_objective(T1, T2, 10)
    classifier = boosting.XGBClassifier(objective=objective, n_estimators=best[1], **params).fit(x, y)
    print(f"through XGBClassifier {classifier.score(x_test, y_test):.1%}")
    return probabilities, classifier.predict_proba(x_test), accuracy


if __name__ == "__main__":
    main()

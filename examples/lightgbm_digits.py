"""LightGBM: the bi-tempered loss as objective and metric, on digits of which 40 % are labelled wrong.

pip install lightgbm scikit-learn
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from bitempered import boosting
from bitempered.boosting import lightgbm_metric, lightgbm_objective
from bitempered.noise import symmetric
from bitempered.numpy import tempered_softmax

try:
    import lightgbm as lgb
except ImportError:
    raise SystemExit("this example needs LightGBM: pip install lightgbm") from None

T1, T2 = 0.8, 1.2


def main(rounds: int = 50) -> tuple[np.ndarray, np.ndarray, float]:
    pixels, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(pixels, labels, test_size=500, random_state=0)
    y = symmetric(y, 0.4, rng=np.random.default_rng(0), num_classes=10)
    x, x_stop, y, y_stop = train_test_split(x, y, test_size=300, random_state=0)  # as noisy as the rest

    params = {"objective": lightgbm_objective(T1, T2, 10), "num_leaves": 8, "learning_rate": 0.1, "verbose": -1}
    params |= {"bagging_fraction": 0.5, "bagging_freq": 1, "feature_fraction_bynode": 0.2, "num_threads": 1}
    # Second derivatives are 10^(1 + t1 - 2 t2) times those of the logistic loss: so is what is compared with them.
    scale = 10 ** (1 + T1 - 2 * T2)
    params |= {"lambda_l2": 10 * scale, "min_sum_hessian_in_leaf": scale}
    train = lgb.Dataset(x, y)
    booster = lgb.train(
        params | {"num_class": 10},
        train,
        rounds,
        feval=lightgbm_metric(T1, T2, 10),
        valid_sets=[lgb.Dataset(x_stop, y_stop, reference=train)],
        callbacks=[lgb.early_stopping(10, verbose=False)],
    )
    probabilities = tempered_softmax(booster.predict(x_test), T2)  # a custom objective's predictions are raw scores
    accuracy = float((probabilities.argmax(1) == y_test).mean())
    print(f"accuracy on clean test labels {accuracy:.1%} after {booster.best_iteration} rounds")

    # The same through scikit-learn. Our subclass of LightGBM's classifier returns classes and these probabilities.
    classifier = boosting.LGBMClassifier(n_estimators=booster.best_iteration, **params).fit(x, y)
    print(f"through LGBMClassifier {classifier.score(x_test, y_test):.1%}")
    return probabilities, classifier.predict_proba(x_test), accuracy


if __name__ == "__main__":
    main()

"""scikit-learn classifiers that minimise the bi-tempered logistic loss: a linear one, and a network (with PyTorch)."""

from bitempered.extras import install as _install

try:
    import scipy as _scipy  # noqa: F401
    import sklearn as _sklearn  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(f"bitempered.sklearn needs scikit-learn: {_install('sklearn')}") from None

from bitempered.sklearn.linear import BiTemperedLogisticRegression
from bitempered.sklearn.network import BiTemperedMLPClassifier

__all__ = ["BiTemperedLogisticRegression", "BiTemperedMLPClassifier"]

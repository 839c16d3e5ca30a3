"""The robust bi-tempered logistic loss, exact for every temperature.

Importing this package imports no framework: use `bitempered.torch`, `jax`, `keras`, `numpy`, `sklearn` or `boosting`.
"""

__version__ = "0.2.0"

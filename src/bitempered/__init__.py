"""The robust bi-tempered logistic loss, exact and for every framework.

Importing this package imports no framework: use `bitempered.torch`.
"""

__version__ = "0.1.0"

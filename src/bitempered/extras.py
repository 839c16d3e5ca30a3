"""What each optional part of the package needs, for errors that say how to install it.

They name the packages rather than an extra of ours: that works for an installed release and for a clone alike.
"""

__all__ = ["install"]

_TORCH = ("torch>=2.6",)
_EXPERIMENTS = (*_TORCH, "matplotlib>=3.8", "pillow>=10", "rich>=13", "pooch>=1.8", "scikit-learn>=1.4", "typer>=0.12")
EXTRAS = {  # as in pyproject.toml
    "torch": _TORCH,
    "jax": ("jax>=0.8",),
    "keras": ("keras>=3.5",),
    "sklearn": ("scikit-learn>=1.7", "scipy>=1.12"),
    "boosting": ("lightgbm>=4", "xgboost>=2.1"),
    "experiments": _EXPERIMENTS,
    "tune": (*_EXPERIMENTS, "optuna>=3"),
    "playground": (*_TORCH, "starlette>=0.40", "typer>=0.12", "uvicorn>=0.40", "websockets>=15"),
}


def install(extra: str) -> str:
    """Return the command that installs what an extra needs.

    >>> install("jax")
    'pip install "jax>=0.8"'
    """
    return "pip install " + " ".join(f'"{requirement}"' for requirement in EXTRAS[extra])

"""Experiments as values: data, models, one training loop, recipes, and their reports."""

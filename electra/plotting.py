"""Figures for PNGs, where matplotlib is installed."""

from typing import Any


def empty_figure(width: float, height: float) -> Any:
    """A matplotlib figure of so many inches to draw in; None where matplotlib is missing: plots are then left out."""
    try:
        from matplotlib import figure
    except ImportError:
        return None
    return figure.Figure(figsize=(width, height), layout="constrained")

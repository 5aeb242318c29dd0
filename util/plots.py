"""Matplotlib, which only the scripts that draw plots need."""

from types import ModuleType


def pyplot(salt: str) -> ModuleType:
    """Returns matplotlib.pyplot, set up to draw without a screen.

    salt: any text that belongs to the plot. It makes the ids inside an SVG reproducible, so that equal data give equal
    files. Raises ValueError if matplotlib is not installed: call this before long work.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("the plots need matplotlib: pip install -r requirements-dev.txt") from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = salt
    return plt

"""Matplotlib, which only the scripts that draw need."""


def pyplot(salt):
    """matplotlib.pyplot, drawing without a screen; `salt` makes SVGs of the same numbers the same file.

    ValueError where it is not installed, so ask before long work.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("the plots need matplotlib: pip install -r requirements-dev.txt") from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = salt
    return plt

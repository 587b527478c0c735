from matplotlib.figure import Figure


def labels_of(figure: Figure, panel: int = 0) -> list[str]:
    """The names of the rows of a panel."""
    return [text.get_text() for text in figure.axes[panel].get_yticklabels()]

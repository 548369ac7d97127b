"""Figures with several panels, in which a label has the same colour, marker and dash everywhere.

Colour-blind readers can distinguish the colours (Okabe and Ito 2008). The markers work without
colours.
"""

import math
from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from recipes.common.markdown import Score

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS, DASHES = "osD^vP*X", ("-", "--", "-.", ":")
COLUMNS = 3  # of panels
MANY = 40  # points of a line; longer lines have no markers

Points = Mapping[float, Score]
"""Position on the x axis -> score. A score at infinity is a line across the panel."""
Lines = Mapping[str, Points]
"""What a panel shows, by the label of the line."""


def draw(
    panels: Mapping[str, Lines],
    title: str,
    axes: tuple[str, str],
    scale: tuple[str, str] = ("linear", "linear"),
    marks: Mapping[str, str] | None = None,
) -> Figure:
    """Return a figure with bars for standard errors, and one legend below all panels.

    Args:
        panels: the lines of each panel, by its title.
        title: of the figure.
        axes: the names of the axes.
        scale: of the axes. A logarithmic x axis has a tick at each point.
        marks: a word across a panel, behind its lines.
    """
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (max(5.0, 4.2 * columns), 3.6 * rows + 1.4)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06))
    figure.suptitle(title)
    grid = [*figure.subplots(rows, columns, squeeze=False).flat]
    for unused in grid[len(panels) :]:
        unused.set_axis_off()
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    handles = {}
    for panel, (name, lines) in zip(grid, panels.items(), strict=False):
        panel.set_title(name, fontsize=10)
        panel.set(xlabel=axes[0], ylabel=axes[1])
        panel.grid(alpha=0.3)
        middle = {"transform": panel.transAxes, "ha": "center", "va": "center", "rotation": 25}
        mark = (marks or {}).get(name, "")
        panel.text(0.5, 0.5, mark, fontsize=26, color="grey", alpha=0.45, zorder=0, **middle)
        places = sorted({place for points in lines.values() for place in points} - {math.inf})
        if not lines:
            panel.set(xticks=[], yticks=[])
            continue
        panel.set_yscale(scale[1])
        if scale[0] == "log" and places:
            panel.set_xscale("log", base=2)
            panel.set_xticks(places, labels=[f"{place:g}" for place in places])
            panel.minorticks_off()
        for label, points in lines.items():
            number = labels.index(label)
            colour = COLOURS[number % len(COLOURS)]
            if across := points.get(math.inf):
                handles[label] = panel.axhline(across[0], label=label, color=colour, ls=":")
                continue
            at = sorted(points)
            means, errors = zip(*(points[place][:2] for place in at), strict=True)
            style = {"marker": MARKERS[number % len(MARKERS)], "ms": 5, "lw": 1.5, "color": colour}
            style["ls"] = DASHES[number // len(COLOURS) % len(DASHES)]
            if len(at) > MANY:
                style["marker"] = ""
            (handles[label],) = panel.plot(at, means, label=label, **style)
            if any(errors):
                bars = [error or 0.0 for error in errors]
                panel.errorbar(at, means, bars, color=colour, fmt="none", capsize=2)
    if handles:
        wide = 1 if max(map(len, handles)) > 40 else min(4, len(handles), 2 * len(panels))
        place = "outside lower center"
        figure.legend(handles.values(), handles, loc=place, ncols=wide, fontsize=8)
    return figure

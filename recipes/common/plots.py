"""Figures with several panels, in which a label has the same colour, marker and dash everywhere.

Colour-blind readers can distinguish the colours (Okabe and Ito 2008). The markers work without
colours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from recipes.common.markdown import Score

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS, DASHES = "osD^vP*X", ("-", "--", "-.", ":")
COLUMNS = 3  # of panels
MANY = 40  # points of a line; longer lines have no markers
MOST_TICKS = 12  # labelled ticks of an axis

Points = Mapping[float, Score]
"""Position on the x axis -> score."""


class Panels:
    """A figure with panels, to which lines are added.

    Args:
        titles: one for each panel.
        title: the title of the figure.
    """

    def __init__(self, titles: Sequence[str], title: str) -> None:
        columns = min(COLUMNS, len(titles))
        rows = math.ceil(len(titles) / columns)
        size = (max(5.0, 4.2 * columns), 3.6 * rows + 1.4)
        self.figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06))
        self.figure.suptitle(title)
        grid = [*self.figure.subplots(rows, columns, squeeze=False).flat]
        self.axes: list[Axes] = grid[: len(titles)]
        for unused in grid[len(titles) :]:
            unused.set_axis_off()
        for panel, name in zip(self.axes, titles, strict=True):
            panel.set_title(name, fontsize=10)
            panel.grid(alpha=0.3)
        self._styles: dict[str, dict[str, Any]] = {}
        self._numbers = count()

    def line(self, panel: Axes, label: str, points: Points) -> None:
        """Draw a line through points, with bars for standard errors.

        Args:
            panel: one of ``axes``.
            label: the label in the legend.
            points: the points of the line.
        """
        places = sorted(points)
        means = [points[place][0] for place in places]
        errors = [points[place][1] or 0.0 for place in places]
        style = {**self._style(label)}
        if len(places) > MANY:
            style["marker"] = ""
        panel.plot(places, means, label=label, **style)
        if not any(errors):
            return
        panel.errorbar(places, means, errors, color=style["color"], fmt="none", capsize=2)

    def across(self, panel: Axes, label: str, height: float) -> None:
        """Draw a horizontal line across a panel."""
        style = {**self._style(label), "marker": "", "ls": ":"}
        panel.axhline(height, label=label, **style)

    def mark(self, panel: Axes, text: str) -> None:
        """Write a word across a panel, behind its lines."""
        place = {"transform": panel.transAxes, "ha": "center", "va": "center", "rotation": 25}
        panel.text(0.5, 0.5, text, fontsize=26, color="grey", alpha=0.45, zorder=0, **place)

    def _style(self, label: str) -> dict[str, Any]:
        if label not in self._styles:
            number = next(self._numbers)
            self._styles[label] = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": MARKERS[number % len(MARKERS)],
                "ls": DASHES[number // len(COLOURS) % len(DASHES)],
                "ms": 5,
                "lw": 1.5,
            }
        return self._styles[label]

    def finished(self, across: str, up: str) -> Figure:
        """Return the figure, with axis labels and one legend below all panels."""
        handles: dict[str, Artist] = {}
        for panel in self.axes:
            panel.set_xlabel(across)
            panel.set_ylabel(up)
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if not handles:
            return self.figure
        columns = 1 if max(map(len, handles)) > 40 else min(4, len(handles), 2 * len(self.axes))
        self.figure.legend(
            handles.values(), handles, loc="outside lower center", ncols=columns, fontsize=8
        )
        return self.figure


def logarithmic(panel: Axes, places: Sequence[float]) -> None:
    """Set a logarithmic x axis with ticks at some places.

    If labels would overlap, only the first one is shown.
    """
    places = sorted(places)
    room = math.log2(places[-1] / places[0]) / MOST_TICKS
    labels, last = [], -math.inf
    for place in places:
        shown = math.log2(place) - last >= room
        labels.append(f"{place:g}" if shown else "")
        last = math.log2(place) if shown else last
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, labels=labels)
    panel.minorticks_off()

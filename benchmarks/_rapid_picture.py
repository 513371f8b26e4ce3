"""The picture of `benchmarks.rapid_transfer`: one request a generation and kind as its trace has it, and
all first bytes against what was left of the step. Colours that can be read on white and on black."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks._rapid_rig import Sample

INK = "#7a7f87"
STEP, WAIT, MOVE = "#8a8f9855", "#d08a2e", "#2f8fd0"
COLOURS = {"step": "#d08a2e", "bypass": "#8f6fd0", "substep": "#2f9f6f"}
#: Where in the step the requests that are drawn came in.
POINTS = {"unfinished": 0.35, "finished": 0.6}


def typical(samples: list[Sample], generation: str, kind: str) -> Sample:
    """The one that came in nearest to the point of the step that is drawn."""
    rows = [s for s in samples if (s.generation, s.kind) == (generation, kind)]

    def off(s: Sample) -> float:
        point = (s.arrived - s.step_began) / (s.step_ended - s.step_began)
        return abs(point - POINTS[kind])

    return min(rows, key=off)


def draw(path: Path, samples: list[Sample], report: dict[str, Any]) -> None:
    """Write the figure; the ending of the name is the format. Needs matplotlib (the extra `replay`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {
        "svg.fonttype": "none", "svg.hashsalt": "rapid_transfer", "font.size": 9.0, "text.color": INK,
        "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "font.family": "sans-serif",
    }  # fmt: skip
    with pyplot.rc_context(style):  # type: ignore[arg-type]
        figure, (top, bottom) = pyplot.subplots(
            2, 1, figsize=(8, 7), height_ratios=(3, 2), layout="constrained"
        )
        _timelines(top, samples)
        _gain(bottom, samples)
        for axis in (top, bottom):
            axis.patch.set_alpha(0)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
        figure.patch.set_alpha(0)
        path.parent.mkdir(parents=True, exist_ok=True)
        date = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, transparent=True, metadata=date)
        pyplot.close(figure)


def _timelines(axis: Any, samples: list[Sample]) -> None:
    names = []
    for row, (generation, kind) in enumerate((g, k) for g in COLOURS for k in POINTS):
        s = typical(samples, generation, kind)

        def ms(at: float, s: Sample = s) -> float:
            return (at - s.step_began) * 1e3

        first, placed = ms(s.first_byte), ms(s.placed)
        axis.broken_barh([(0, ms(s.step_ended))], (row - 0.4, 0.8), color=STEP, lw=0)
        axis.broken_barh([(ms(s.arrived), first - ms(s.arrived))], (row - 0.1, 0.2), color=WAIT)
        axis.broken_barh([(first, placed - first)], (row - 0.22, 0.44), color=MOVE)
        axis.plot([ms(s.arrived)], [row], marker="o", ms=5, color=WAIT)
        axis.plot([ms(s.admitted)], [row], marker="D", ms=5, color=COLOURS["substep"])
        after = (s.admitted - s.arrived) * 1e3
        text = f"first byte +{s.first_byte_ms:.1f} ms, admitted +{after:.0f} ms"
        axis.text(ms(s.arrived), row - 0.44, text, va="bottom", fontsize=8)
        names.append(f"{generation}\n{kind}")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("ms since P's step began")
    marks = [
        axis.plot([], [], lw=8, color=STEP, label="P's step")[0],
        axis.plot([], [], marker="o", lw=3, color=WAIT, label="TRANSFER_KV arrived, waits")[0],
        axis.plot([], [], lw=6, color=MOVE, label="KV moves")[0],
        axis.plot([], [], marker="D", lw=0, color=COLOURS["substep"], label="D has it")[0],
    ]
    axis.legend(
        handles=marks, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
    )


def _gain(axis: Any, samples: list[Sample]) -> None:
    for generation, colour in COLOURS.items():
        for kind, marker in (("unfinished", "o"), ("finished", "x")):
            rows = [s for s in samples if (s.generation, s.kind) == (generation, kind)]
            axis.plot(
                [s.residual_ms for s in rows], [s.first_byte_ms for s in rows], marker, ms=5,
                color=colour, label=f"{generation}, {kind}",
            )  # fmt: skip
    most = max(s.residual_ms for s in samples)
    axis.plot([0, most], [0, most], color=INK, lw=0.8, ls="--", label="the rest of the step")
    axis.set_xlabel("left of the step when TRANSFER_KV arrived, ms")
    axis.set_ylabel("first byte after that, ms")
    axis.legend(frameon=False, fontsize=8, loc="upper left")

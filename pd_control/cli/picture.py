"""One request's life on P and D as an SVG picture: the whole of it, and its last milliseconds enlarged.

Drawn from stage events alone. Colours and grey are chosen to be read on light and on dark ground; there
is no background.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pd_control.cli.stages import SideEvents, by_request
from pd_control.trace import Stage, TraceEvent

WIDTH, LEFT, RIGHT = 940, 165, 35
GREY, P_COLOUR, KV_COLOUR, D_COLOUR = "#7d8590", "#3b82f6", "#d97706", "#16a34a"
BAR = 20
ROW = 30

Point = tuple[float, TraceEvent, str]  # seconds, event, instance


class PictureError(ValueError):
    """The events do not make a picture; the message says what is missing."""


class _Canvas:
    """Elements of an SVG, and a scale from seconds to x."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self.start_s, self.end_s = 0.0, 1.0

    def scale(self, start_s: float, end_s: float) -> None:
        self.start_s, self.end_s = start_s, max(end_s, start_s + 1e-9)

    def x(self, at_s: float) -> float:
        share = (at_s - self.start_s) / (self.end_s - self.start_s)
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)

    def text(self, x: float, y: float, text: str, anchor: str = "start", **style: str) -> None:
        extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in style.items())
        self.items.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
        )

    def bar(self, start_s: float, end_s: float, y: float, colour: str, label: str = "") -> None:
        left, right = self.x(start_s), self.x(end_s)
        self.items.append(
            f'<rect x="{left:.1f}" y="{y}" width="{max(1.5, right - left):.1f}" height="{BAR}" '
            f'rx="2" fill="{colour}" fill-opacity="0.75"/>'
        )
        if label and right - left > 7 * len(label):
            self.text(left + 8, y + 14, label, fill="white")

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.items.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{colour}" stroke-width="1.2"{dashes}/>'
        )

    def svg(self, height: float) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'font-family="system-ui, sans-serif" font-size="12" fill="{GREY}">\n'
            + "\n".join(self.items)
            + "\n</svg>\n"
        )


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def timeline_svg(sides: Sequence[SideEvents], request_id: str) -> str:
    """The picture of one request that went through P and was admitted on D.

    Raises:
        PictureError: it was not, or its events are overwritten.
    """
    points = by_request(sides).get(request_id, [])
    at = {stage: [p for p in points if p[1].stage is stage] for stage in Stage}
    needed = (
        Stage.TAKEN_OVER,
        Stage.MESSAGE_RECEIVED,
        Stage.PLANNED,
        Stage.BOUND,
        Stage.LAYERS_READY,
        Stage.SUBMITTED,
    )
    for stage in (*needed, Stage.PLACED, Stage.ADMITTED):
        if not at[stage]:
            raise PictureError(f"no event {stage.label!r} of request {request_id!r} is left")
    canvas = _Canvas()
    y = _whole(canvas, at, 24)
    y = _end(canvas, at, y + 40)
    return canvas.svg(y + 12)


def _first_byte_s(bound: Sequence[Point]) -> float:
    """BOUND carries the microseconds until the first layer was handed to its connection."""
    return min(at_s + event.value / 1e6 for at_s, event, _ in bound)


def _whole(c: _Canvas, at: dict[Stage, list[Point]], y: float) -> float:
    """From D's taking the request over to its admission; returns the y below it."""
    began, admitted = at[Stage.TAKEN_OVER][0][0], at[Stage.ADMITTED][-1][0]
    ready = max(p[0] for p in at[Stage.LAYERS_READY])
    planned = sorted(p[0] for p in at[Stage.PLANNED])
    # In dual mode P has the request from its own client, and may have begun before D's word comes.
    known = min(p[0] for p in at[Stage.MESSAGE_RECEIVED])
    first_byte = _first_byte_s(at[Stage.BOUND])
    tokens = max(p[1].value for p in at[Stage.PLACED])
    c.scale(began, admitted + (admitted - began) * 0.02)
    c.text(LEFT, y - 8, f"{tokens:,} prompt tokens, {duration(admitted - began)} from D's taking it over "
           "to its admission", font_weight="bold")  # fmt: skip
    rows = (
        ("P", "computes the prompt", P_COLOUR, known, ready, "step by step"),
        ("P → D", "KV, as layers are ready", KV_COLOUR, first_byte, max(p[0] for p in at[Stage.PLACED]), ""),
        ("D", "holds blocks for it", D_COLOUR, (at[Stage.BLOCKS_LEASED] or at[Stage.TAKEN_OVER])[0][0],
         admitted, "waits: no step, no poll"),
    )  # fmt: skip
    top = y
    for who, what, colour, start, end, label in rows:
        c.text(LEFT - 10, y + 9, who, "end", font_weight="bold")
        c.text(LEFT - 10, y + 21, what, "end", font_size="10")
        c.bar(start, end, y, colour, label)
        y += ROW
    for start in planned:
        c.line(c.x(start), top, c.x(start), top + BAR, "white")
    c.line(c.x(admitted), top, c.x(admitted), y, D_COLOUR, "3 2")
    _axis(c, y, began, admitted)
    return y + 18


def _axis(c: _Canvas, y: float, start: float, end: float) -> None:
    c.line(c.x(start), y, c.x(end), y, GREY)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at_s = start + (end - start) * share
        c.line(c.x(at_s), y, c.x(at_s), y + 4, GREY)
        c.text(c.x(at_s), y + 16, duration(at_s - start), "middle", font_size="10")


def _end(c: _Canvas, at: dict[Stage, list[Point]], y: float) -> float:
    """From P's last layer to D's admission, each event with its time; returns the y below it."""
    ready, admitted = max(p[0] for p in at[Stage.LAYERS_READY]), at[Stage.ADMITTED][-1][0]
    marks = [
        ("P", "last layer is ready", ready, P_COLOUR),
        ("P", "its last piece has left", max(p[0] for p in at[Stage.SUBMITTED]), P_COLOUR),
        ("D", "hears that its last byte is placed", max(p[0] for p in at[Stage.PLACED]), D_COLOUR),
        ("D", "admitted: it decodes next", admitted, D_COLOUR),
    ]
    if at[Stage.SEND_DONE]:
        released = max(p[0] for p in at[Stage.SEND_DONE])
        marks.append(("P", "blocks are free for others", released, P_COLOUR))
    marks.sort(key=lambda m: m[2])
    c.scale(ready, max(m[2] for m in marks) + (marks[-1][2] - ready) * 0.3)
    c.text(LEFT, y - 8, f"the end of it: {duration(admitted - ready)} from P's last layer to D's admission",
           font_weight="bold")  # fmt: skip
    for who, what, when, colour in marks:
        x = c.x(when)
        c.text(LEFT - 10, y + 14, f"{who}  +{duration(when - ready)}", "end")
        c.line(LEFT, y + 10, x, y + 10, GREY, "1 3")
        c.items.append(f'<circle cx="{x:.1f}" cy="{y + 10:.1f}" r="5" fill="{colour}"/>')
        c.text(x + 10, y + 14, what)
        y += 22
    return y

"""The picture of a timeline: some rounds, drafting beside verification, as an SVG.

Written by hand, so that no plotting library is needed for rectangles. One lane per verifier,
drafter and sequence; a line from a batch of drafts to each verification that used one of them.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from orchestrator.timeline import Timeline, Verify

_WIDTH, _LEFT, _RIGHT, _TOP = 1000, 110, 20, 56
_LANE, _BAR = 26, 18
_MAX_SEQUENCES = 8
_FORWARD, _RULE, _DRAFT, _ROW, _WAIT = "#1e6fb3", "#2a9d8f", "#e08a1e", "#bcd6ec", "#e3b7b0"
_LEGEND = (
    (_FORWARD, "target's forward"),
    (_RULE, "rule"),
    (_DRAFT, "drafting"),
    (_ROW, "row sent .. verdict"),
    (_WAIT, "row waits for its plan"),
)


def draw_timeline(timeline: Timeline, title: str, num_rounds: int = 10) -> str:
    """An SVG of up to `num_rounds` rounds from the middle; needs at least one."""
    shown = _choose(timeline.verifies, num_rounds)
    return _Picture(timeline, shown[0].sent, shown[-1].received).svg(title)


def _choose(verifies: Sequence[Verify], num_rounds: int) -> Sequence[Verify]:
    """Consecutive batches of the first verifier, if possible without a prompt among them."""
    ours = [v for v in verifies if v.replica == verifies[0].replica]
    first = max(0, (len(ours) - num_rounds) // 2)
    for begin in sorted(range(max(1, len(ours) - num_rounds + 1)), key=lambda i: abs(i - first)):
        rows = [row for v in ours[begin : begin + num_rounds] for row in v.batch.rows]
        if all(len(row.new_token_ids) == 1 for row in rows):
            return ours[begin : begin + num_rounds]
    return ours[first : first + num_rounds]


class _Picture:
    """`begin` and `end` are what is shown, in nanoseconds."""

    def __init__(self, timeline: Timeline, begin: int, end: int) -> None:
        self._timeline, self._begin, self._end = timeline, begin, end
        self._parts: list[str] = []
        seen = [v for v in timeline.verifies if v.received > begin and v.sent < end]
        lanes = sorted({v.replica for v in seen})
        lanes += sorted({d.replica for d in timeline.drafts if d.end > begin and d.begin < end})
        sequences = sorted({row.sequence for v in seen for row in v.batch.rows})
        lanes += [f"sequence {number}" for number in sequences[:_MAX_SEQUENCES]]
        self._lanes = {name: number for number, name in enumerate(lanes)}
        self._bottom = _TOP + _LANE * len(lanes)

    def svg(self, title: str) -> str:
        """The whole picture."""
        height = self._bottom + 40
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        )
        self._text(_WIDTH / 2, 18, "middle", title)
        self._legend()
        for name, lane in self._lanes.items():
            y = _TOP + _LANE * lane
            self._text(_LEFT - 8, y + _BAR - 4, "end", name)
            self._line(_LEFT, y + _LANE - 4, _WIDTH - _RIGHT, y + _LANE - 4, "#eee")
        self._axis()
        for verify in self._timeline.verifies:
            self._bar(verify.replica, verify.begin, verify.forward_end, _FORWARD)
            self._bar(verify.replica, verify.forward_end, verify.rule_end, _RULE)
            self._bar(verify.replica, verify.rule_end, verify.end, _DRAFT)
            for row in verify.batch.rows:
                self._bar(f"sequence {row.sequence}", verify.sent, verify.received, _ROW)
        for draft in self._timeline.drafts:
            self._bar(draft.replica, draft.begin, draft.end, _DRAFT)
        for wait in self._timeline.waits:
            self._bar(f"sequence {wait.sequence}", wait.begin, wait.end, _WAIT)
        self._arrows()
        return "\n".join((*head, *self._parts, "</svg>")) + "\n"

    def _legend(self) -> None:
        x = float(_LEFT)
        for colour, text in _LEGEND:
            self._parts.append(f'<rect x="{x}" y="30" width="12" height="12" fill="{colour}"/>')
            self._text(x + 17, 40, "start", text)
            x += 40 + 6.5 * len(text)

    def _axis(self) -> None:
        length_ms = (self._end - self._begin) / 1e6
        step = next(s for s in _STEPS_MS if length_ms / s <= 12 or s == _STEPS_MS[-1])
        for number in range(int(length_ms / step) + 1):
            x = self._x(self._begin + round(number * step * 1e6))
            self._line(x, _TOP - 6, x, self._bottom, "#ddd")
            self._text(x, self._bottom + 16, "middle", f"{number * step:g}")
        self._text(_WIDTH / 2, self._bottom + 32, "middle", "milliseconds")

    def _arrows(self) -> None:
        for use in self._timeline.uses:
            lane = self._lanes.get(f"sequence {use.sequence}")
            source = self._lanes.get(use.source.replica)
            if lane is None or source is None:
                continue
            if self._begin <= use.source.end and use.verify.sent <= self._end:
                x, y = self._x(use.source.end), _TOP + _LANE * source + _BAR
                self._line(x, y, self._x(use.verify.sent), _TOP + _LANE * lane, "#888", 0.6)

    def _x(self, at: int) -> float:
        share = (at - self._begin) / max(1, self._end - self._begin)
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(1.0, max(0.0, share))

    def _bar(self, lane: str, begin: int, end: int, colour: str) -> None:
        """A bar, if it is in the picture; a very short one is still to be seen."""
        if lane in self._lanes and end > begin and end > self._begin and begin < self._end:
            x, y = self._x(begin), _TOP + _LANE * self._lanes[lane]
            width = max(0.7, self._x(end) - x)
            place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}"'
            self._parts.append(f'<rect {place} fill="{colour}"/>')

    def _line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0
    ) -> None:
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self._parts.append(f'<line {ends} stroke="{colour}" stroke-width="{width}"/>')

    def _text(self, x: float, y: float, anchor: str, text: str) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}>{escape(text)}</text>")


_STEPS_MS = tuple(base * 10**power for power in range(-1, 5) for base in (1, 2, 5))

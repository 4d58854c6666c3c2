"""The picture of a training run: loss and acceptance over the steps, as an SVG.

Written by hand, so that no plotting library is needed for two lines. Knows nothing of training but
its `Point`s.
"""

from collections.abc import Sequence

from drafter_service.distil.train import Point

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 60, 40, 50
_LOSS, _ACCEPTANCE = "#b3541e", "#1e6fb3"


def draw_curve(history: Sequence[Point], title: str) -> str:
    """An SVG: validation loss against the left scale, mean acceptance against the right one.

    `history` needs at least one point.
    """
    losses = [point.validation_loss for point in history]
    accepted = [point.acceptance.mean for point in history]
    last = max(point.step for point in history)
    xs = [_LEFT + (_WIDTH - _LEFT - _RIGHT) * point.step / last for point in history]
    top_loss, top_accepted = _ceiling(max(losses)), _ceiling(max(accepted))
    middle = _WIDTH / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(middle, 22, "middle", "black", title),
        _text(middle, _HEIGHT - 12, "middle", "black", f"steps (of {last})"),
    ]
    for fifth in range(6):
        y = _y(fifth / 5, 1.0)
        parts += [
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>',
            _text(_LEFT - 8, y + 4, "end", _LOSS, f"{top_loss * fifth / 5:.2f}"),
            _text(
                _WIDTH - _RIGHT + 8, y + 4, "start", _ACCEPTANCE, f"{top_accepted * fifth / 5:.2f}"
            ),
            _text(
                _LEFT + (_WIDTH - _LEFT - _RIGHT) * fifth / 5,
                _HEIGHT - _BOTTOM + 18,
                "middle",
                "black",
                f"{round(last * fifth / 5)}",
            ),
        ]
    parts += [
        _line(xs, [_y(loss, top_loss) for loss in losses], _LOSS),
        _line(xs, [_y(share, top_accepted) for share in accepted], _ACCEPTANCE),
        _text(_LEFT, 36, "start", _LOSS, "validation loss (nats)"),
        _text(_WIDTH - _RIGHT, 36, "end", _ACCEPTANCE, "mean acceptance, held-out prompts"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top


def _ceiling(value: float) -> float:
    """A round number that is not below a positive value."""
    step = 0.1
    while step * 10 <= value:
        step *= 10
    return step * max(1, -int(-value // step))


def _text(x: float, y: float, anchor: str, colour: str, text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def _line(xs: Sequence[float], ys: Sequence[float], colour: str) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
        for x, y in zip(xs, ys, strict=True)
    )
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'

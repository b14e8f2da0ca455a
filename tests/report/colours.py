"""Colour arithmetic for the tests of the palette: CIELAB distance, WCAG contrast, and colour-blind vision.

Simulation of dichromats: G. M. Machado, M. M. Oliveira, L. A. F. Fernandes, "A Physiologically-based Model for Simulation of
Color Vision Deficiency", IEEE TVCG 15(6), 2009, matrices of severity 1.0, applied to linear RGB.
"""

import math

VISION = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(colour: str) -> tuple[float, ...]:
    """`#rrggbb` -> linear RGB in 0..1."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)


def contrast(a: str, b: str) -> float:
    """The contrast ratio of WCAG 2: 1 to 21."""
    one, two = (0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (linear(a), linear(b)))
    return (max(one, two) + 0.05) / (min(one, two) + 0.05)


def lab(colour: str, vision: str) -> tuple[float, float, float]:
    """CIELAB (D65) of the colour as that vision sees it."""
    rgb = [min(1.0, max(0.0, sum(w * c for w, c in zip(row, linear(colour), strict=True)))) for row in VISION[vision]]
    r, g, b = rgb
    x, y, z = 0.4124 * r + 0.3576 * g + 0.1805 * b, 0.2126 * r + 0.7152 * g + 0.0722 * b, 0.0193 * r + 0.1192 * g + 0.9505 * b
    fx, fy, fz = (math.cbrt(t) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (x / 0.95047, y, z / 1.08883))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def distance(a: str, b: str) -> float:
    """The smallest CIELAB distance (CIE76) of two colours over all kinds of vision."""
    return min(math.dist(lab(a, vision), lab(b, vision)) for vision in VISION)

"""The colours of the dashboard's lines, for every kind of colour vision."""

import itertools
import re

import pytest

from tuneserve_server.routes.dashboard import FOLDER

# Machado, Oliveira and Fernandes 2009, severity 1.0, for linear RGB.
VISIONS = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# Ottosson 2020: linear RGB to cone responses, and their cube roots to OKLab.
CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def times(matrix: list[list[float]], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def oklab(colour: str, vision: str) -> list[float]:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    seen = [min(max(each, 0.0), 1.0) for each in times(VISIONS[vision], linear)]
    return times(LAB, [each ** (1 / 3) for each in times(CONES, seen)])


def test_oklab_is_computed_as_published() -> None:
    assert oklab("#ffffff", "normal") == pytest.approx([1, 0, 0], abs=1e-3)
    assert oklab("#ff0000", "normal") == pytest.approx([0.628, 0.225, 0.126], abs=1e-3)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_ten_lines_differ_for_every_kind_of_colour_vision(theme: str, vision: str) -> None:
    css = (FOLDER / "theme.css").read_text()
    block = css.split('[data-theme="dark"]')[theme == "dark"]
    colours = re.findall(r"--line-\d+: (#[0-9a-f]{6});", block)
    assert len(colours) == 10
    seen = {colour: oklab(colour, vision) for colour in colours}
    for one, other in itertools.combinations(colours, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen[one], seen[other], strict=True)) ** 0.5
        assert distance >= 0.1, (one, other)

"""One table of colours: told apart in grey, by people who do not see all colours, and on both
papers.
"""

import itertools

import numpy as np
import pytest

from fedbcd.palette import DASHES, METHODS, OTHERS, PAPER, contrast, looks_of, style_sheet

THEMES = ("light", "dark")
# How colours look without one of the three kinds of cones: Machado, Oliveira and Fernandes (2009),
# complete loss, on linear red, green and blue.
WITHOUT = {
    "all there": np.eye(3),
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
LEAST = 9.0  # CIE76 difference; 2.3 can just be noticed


def _seen(colour: str, without: str) -> np.ndarray:
    """A colour in CIE Lab, as it looks to somebody."""
    part = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    rgb = np.clip(np.asarray(WITHOUT[without]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ratio = np.asarray(to_xyz) @ rgb / [0.9505, 1.0, 1.089]
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", THEMES)
def test_neighbours_are_told_apart_in_grey_and_all_from_the_paper(theme: str) -> None:
    colours = [getattr(look, theme) for look in METHODS.values()]
    assert all(contrast(a, b) >= 3 for a, b in itertools.pairwise(colours))
    paper = PAPER[THEMES.index(theme)]
    assert all(contrast(getattr(one, theme), paper) >= 3 for one in (*METHODS.values(), *OTHERS))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("without", WITHOUT)
def test_no_two_methods_look_alike_to_anybody(theme: str, without: str) -> None:
    """By colour; the marks and dashes of those that are near differ besides."""
    looks = [*METHODS.values(), *OTHERS]
    for one, other in itertools.combinations(looks, 2):
        a, b = (_seen(getattr(look, theme), without) for look in (one, other))
        differ = (one.mark, one.dash) != (other.mark, other.dash)
        near = np.linalg.norm(a - b) < LEAST
        assert differ, "two of one shape"
        assert not (near and one in METHODS.values() and other in METHODS.values()), (one, other)
        assert not (near and one.dash == other.dash), (one, other)


def test_a_method_keeps_its_colour_whatever_stands_beside_it() -> None:
    alone, among = looks_of(["fedbcd"]), looks_of(["local", "mine:Own", "fedbcd", "fedavg"])
    assert alone[0] == among[2] == METHODS["fedbcd"]
    assert among[1] == OTHERS[0]


@pytest.mark.parametrize("method", [*METHODS, "mine:Own"])
def test_several_runs_of_one_method_are_a_ramp_with_dashes(method: str) -> None:
    ramp = looks_of([method] * 5)
    assert len({one.light for one in ramp}) == len({one.dark for one in ramp}) == 5
    assert [one.dash for one in ramp] == [*DASHES, DASHES[0]]
    for theme, paper in zip(THEMES, PAPER, strict=True):
        assert all(contrast(getattr(one, theme), paper) >= 3 for one in ramp)


def test_pages_take_the_table_as_it_is() -> None:
    sheet = style_sheet()
    assert "--waiting: #c9ced5; " in sheet
    assert sheet.count("--straggler: ") == 3  # light, dark by the system, dark by choice

"""The terminal report: it fits, it says what matters first, and unknown is never a zero."""

import re
import unicodedata

import pytest
from report.samples import NAMES, hostile, huge, nothing_known, sample

from jaxmem.report import terminal

LONG = "blocks/" + "very_long_module_name/" * 14 + "日本語<b>\"&'\n\tend"


def widths(text):
    """Cells of each line, counted here by hand and not by the code that lays them out."""
    wide = lambda c: 2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1  # noqa: E731
    return [sum(map(wide, line)) for line in text.rstrip("\n").split("\n")]


@pytest.mark.parametrize("width", [60, 80, 96, 100, 132])
@pytest.mark.parametrize("check", [*map(sample, NAMES), nothing_known(), hostile(LONG), huge()], ids=[*NAMES, "nothing", "long", "huge"])
def test_every_line_fits(check, width):
    text = terminal.render(check, width=width, color=False)
    assert max(widths(text)) == width  # the rules reach the edge, and nothing goes over it
    assert "\x1b" not in text and all(line == line.rstrip() for line in text.split("\n"))


@pytest.mark.parametrize("check", [*map(sample, NAMES), hostile(LONG)], ids=[*NAMES, "long"])
def test_colour_adds_only_styles(check):
    plain, coloured = (terminal.render(check, color=color) for color in (False, True))
    assert "\x1b[" in coloured
    bare = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in bare.split("\n")] == [line.rstrip() for line in plain.split("\n")]


@pytest.mark.parametrize("name", NAMES)
def test_one_screen(name):
    assert len(terminal.render(sample(name)).split("\n")) <= 62


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("fits_v5p", " FITS  85.93 GiB (89.8%) left of 95.74 GiB usable · peak 9.81 GiB · worst program: train"),
        ("tight_h100", " TIGHT  1.66 GiB (2.8%) left of 59.33 GiB usable · peak 57.67 GiB · worst program: train"),
        ("does_not_fit_v5e", " DOES NOT FIT  5.62 GiB more than the 15.75 GiB usable · peak 21.37 GiB · worst program: train"),
        ("unknown_abort_v6e", " UNKNOWN  compiler aborted (train), timed out (eval) · worst program: train"),
        ("unknown_cpu", " UNKNOWN  the peak is not known"),
    ],
)
def test_the_verdict_is_the_first_line(name, first):
    assert terminal.render(sample(name), color=False).split("\n")[0] == first


def test_it_says_what_was_found():
    text = terminal.render(sample("fits_v5p"), color=False)
    row = next(line for line in text.split("\n") if line.startswith("train"))
    # peak, sum, arguments, outputs, aliased, temporary, host: GiB by hand from the sample's bytes
    assert row.split() == ["train", "ok", "9.81", "9.79", "1.40", "1.40", "1.40", "8.39", "0", "63", "s"]
    assert re.search(r"saved activations +blocks +2\.00 GiB +20\.4% +█", text)
    assert re.search(r"2\.00 GiB +0 B +saved +bf16\[32,1,8192,4096\] +P\(-,fsdp,-,-\) +blocks +decoder\.py:141", text)
    assert re.search(r"step 1\.642 s +tokens/s 319,298 +MFU 57\.3%", text)
    assert re.search(r"fsdp +0\.112 s +0\.604 s +6\.8%", text)
    assert re.search(r"fsdp +all-gather +258 +29\.71 GiB +71 ms", text)
    assert "backend: tpu v5p; jaxmem 0.0.0+sample" in text and "compile: programs, peak, usable" in text and "estimate: step_s" in text


def test_advice_and_reasons():
    text = terminal.render(sample("does_not_fit_v5e"), color=False)
    assert re.search(r"remat=offload:decoder_layer_input +fits +11\.52 GiB +— +compile", text)
    assert "train: out of memory: RESOURCE_EXHAUSTED: E1000" in text and "▲ usable 15.75 GiB" in text
    assert "compiler aborted: the compiler ended with signal 6" in terminal.render(sample("unknown_abort_v6e"), color=False)


def test_unknown_is_a_dash_and_never_zero():
    text = terminal.render(nothing_known(), color=False)
    assert not re.search(r"(?<![\w.])0(\.0+)?(?![\w.])", text), text
    assert "step —  tokens/s —  MFU —" in text
    for name in ("init", "train", "eval", "save"):
        assert next(line for line in text.split("\n") if line.startswith(name)).split()[2:] == ["—"] * 8


def test_control_characters_do_not_reach_the_terminal():
    text = terminal.render(hostile("a\x1b[31mred\x07\u202eback\ud800"), color=False)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs") for c in text.replace("\n", ""))
    text.encode("utf-8")


def test_plain_unless_it_is_a_terminal(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    check = sample("fits_v5p")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b" not in terminal.render(check)  # pytest's captured output is no terminal
    monkeypatch.setattr("sys.stdout", Terminal())
    assert "\x1b" in terminal.render(check)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in terminal.render(check)
    assert "\x1b" in terminal.render(check, color=True)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in terminal.render(check)


def test_a_programs_problem_is_said_once():
    check = sample("unknown_abort_v6e")
    check["problems"] += ["save: " + check["programs"]["save"]["problems"][0], "something else"]
    text = terminal.render(check, color=False)
    assert text.count("a host callback") == 1 and "problem: something else" in text

"""The HTML report in a real browser: Debian's chromium, headless.

Where there is no chromium, these tests are not collected (`conftest.py`), except that with the environment variable CI set they
are, and fail with the command that installs it.
"""

import base64
import io
import json
import struct
import zlib

import pytest
from report.browser import Browser, chromium
from report.samples import NAMES, hostile, huge, nothing_known, sample

from jaxmem.report import html as report
from jaxmem.report.kinds import KINDS, UNATTRIBUTED

COLOURS = {kind.name: kind for kind in (*KINDS.values(), UNATTRIBUTED)}
NASTY = "</script><script>document.title='owned'</script><img src=https://example.com/x.png> \"q\" 'q' &amp;"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert chromium(), "no chromium on the path; install it with: apt-get install --yes --no-install-recommends chromium"
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Renders a check, opens it, and afterwards asserts that the page was silent and loaded nothing but itself."""
    opened = []

    def open_(check, **options):
        path = tmp_path / f"{len(opened)}.html"
        path.write_text(report.render(check), encoding="utf-8")
        opened.append(path.as_uri())
        browser.open(path, **options)
        assert_silent(path.as_uri())
        return browser

    def assert_silent(url):
        browser.value("new Promise(resolve => setTimeout(resolve, 30))")
        asked = [parameters["request"]["url"] for method, parameters in browser.events if method == "Network.requestWillBeSent"]
        assert asked == [url]
        loud = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        assert not [event for event in browser.events if event[0] in loud]

    yield open_
    if opened:
        assert_silent(opened[-1])


def painted(page, x, y):
    """The colour of the page's pixel at (x, y), as a screenshot of one pixel, where every filter of PNG is a difference to 0."""
    clip = {"x": x, "y": y, "width": 1, "height": 1, "scale": 1}
    png = base64.b64decode(page.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"])
    stream, chunks = io.BytesIO(png[8:]), {}
    while head := stream.read(8):
        size, kind = struct.unpack(">I4s", head)
        chunks[kind] = chunks.get(kind, b"") + stream.read(size)
        stream.read(4)
    assert struct.unpack(">IIB", chunks[b"IHDR"][:9]) == (1, 1, 8)
    return tuple(zlib.decompress(chunks[b"IDAT"])[1:4])


@pytest.mark.parametrize("check", [*map(sample, NAMES), nothing_known(), huge(), hostile(NASTY)], ids=[*NAMES, "nothing", "huge", "nasty"])
@pytest.mark.parametrize("width", [400, 1400])
def test_it_fits_the_window_and_is_silent(show, check, width):
    page = show(check, width=width)
    assert page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.value("document.title") != "owned"
    overflowing = """(right => [...document.querySelectorAll('h1,h2,.sub,.lead,.notes li,dd,.figures div,.legend li,.cell')]
        .filter(e => e.offsetParent && e.getBoundingClientRect().right > right + 0.5).map(e => e.outerHTML)
    )(document.documentElement.clientWidth)"""
    assert page.value(overflowing) == []


@pytest.mark.parametrize("name", ["fits_v5p", "does_not_fit_v5e", "tight_h100"])
def test_areas_are_as_tall_as_the_data(show, name):
    check = sample(name)
    entry = check["timeline"][0]
    page = show(check)
    # Just after points of the schedule, each kind's height there: the part of a fine vertical probe that its path covers.
    probe = """(() => {
        const chart = document.querySelector('.schedule'), svg = chart.querySelector('svg');
        const [left, , wide, tall] = svg.getAttribute('viewBox').split(' ').map(Number);
        const out = {top: +chart.dataset.top, heights: []};
        for (const share of SHARES) {
            const found = {}, paths = [...svg.querySelectorAll('path.area')];
            let highest = 0, overlaps = 0;
            for (let i = 0; i < 500; i++) {
                const at = new DOMPoint(left + share * wide, (i + 0.5) / 500 * tall);
                const inside = paths.filter(path => path.isPointInFill(at)).map(path => path.dataset.kind);
                for (const kind of inside) found[kind] = (found[kind] || 0) + 1 / 500;
                if (inside.length) highest = Math.max(highest, 1 - i / 500);
                overlaps += inside.length > 1;
            }
            out.heights.push([found, highest, overlaps]);
        }
        return out;
    })()"""
    points = entry["points"]
    chosen = [points[i] for i in range(3, len(points) - 1, len(points) // 8)] + [p for p in points if p["t"] == entry["peak_t"]]
    span = points[-1]["t"] - points[0]["t"]
    got = page.value(probe.replace("SHARES", json.dumps([(point["t"] - points[0]["t"]) / span + 0.002 for point in chosen])))
    for point, (heights, highest, overlaps) in zip(chosen, got["heights"], strict=True):
        want = point["by_kind"] | {UNATTRIBUTED.name: point["bytes"] - sum(point["by_kind"].values())}
        for kind in want | heights:
            assert heights.get(kind, 0) * got["top"] == pytest.approx(want.get(kind, 0), abs=0.006 * got["top"]), (
                point["t"],
                kind,
            )
        # They stand on one another.
        assert highest * got["top"] == pytest.approx(point["bytes"], abs=0.006 * got["top"])
        assert overlaps <= len(want)
    # The marks stand where the data says, in pixels of the page.
    marks = page.value("""(() => {
        const plot = document.querySelector('.plot').getBoundingClientRect();
        const dot = document.querySelector('.peak-dot').getBoundingClientRect();
        const line = document.querySelector('.usable-line'), y = line && line.getBoundingClientRect().top;
        return {dot: (plot.bottom - dot.top - dot.height / 2) / plot.height, usable: line && (plot.bottom - y) / plot.height};
    })()""")
    assert marks["dot"] * got["top"] == pytest.approx(check["peak_bytes"], rel=0.02)
    if name == "fits_v5p":  # the usable bytes are ten times the peak: named, not drawn
        assert marks["usable"] is None and "95.74 GiB, above this chart" in page.value("document.querySelector('.plot').innerText")
    else:
        assert marks["usable"] * got["top"] == pytest.approx(check["usable_bytes"], rel=0.02)


@pytest.mark.parametrize("width", [400, 1200])
def test_one_treemap_is_shown_and_its_cells_are_bytes(show, width):
    check = sample("does_not_fit_v5e")
    page = show(check, width=width)
    cells = page.value("""[...document.querySelectorAll('.treemap')].filter(map => map.offsetParent).map(map => {
        const all = map.getBoundingClientRect();
        return [...map.querySelectorAll('.cell')].map(cell => {
            const box = cell.getBoundingClientRect(), fill = cell.firstElementChild.getBoundingClientRect();
            const inside = [box, fill].every(it => it.right < all.right + 1 && it.bottom < all.bottom + 1);
            return [+cell.dataset.bytes, box.width * box.height / (all.width * all.height), inside];
        });
    })""")
    assert len(cells) == 1
    for size, share, inside in cells[0]:
        assert share == pytest.approx(size / check["peak_bytes"], abs=0.002) and inside


def test_bars_of_time(show):
    check = sample("fits_v5p")
    seconds = check["seconds_by_limit"]
    page = show(check)
    shares = page.value("""[...document.querySelectorAll('.bars .bar')].map(bar => [...bar.children].map(part =>
        [part.textContent, part.getBoundingClientRect().width / bar.getBoundingClientRect().width]))""")
    want = [
        ["math", seconds["math"]],
        ["memory", seconds["memory"]],
        ["fsdp", seconds["fsdp_exposed"]],
        ["bubble", seconds["bubble"]],
    ]
    assert [label for label, _ in shares[0]] == [label for label, _ in want]
    for (_, share), (_, value) in zip(shares[0], want, strict=True):
        assert share == pytest.approx(value / check["step_s"], abs=0.005)
    assert shares[1] == [["fsdp", pytest.approx(seconds["fsdp_hidden"] / check["step_s"], abs=0.005)]]


def rgb(colour):
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def shown(page):
    """Background of the page, and the fills of the chart's areas, as computed."""
    found = page.value("""[getComputedStyle(document.body).backgroundColor,
        [...document.querySelectorAll('.schedule path.area')].map(path => [path.dataset.kind, getComputedStyle(path).fill])]""")
    numbers = lambda text: tuple(map(int, text.removeprefix("rgb(").rstrip(")").split(", ")))  # noqa: E731
    return numbers(found[0]), {kind: numbers(fill) for kind, fill in found[1]}


def test_both_schemes_and_the_toggle(show):
    check = sample("does_not_fit_v5e")
    seen = {}
    for scheme, other in (("light", "dark"), ("dark", "light")):
        page = show(check, scheme=scheme)
        seen[scheme] = shown(page)
        assert page.value("document.getElementById('theme').textContent").lower() == other
        assert seen[scheme][1] == {kind: rgb(getattr(COLOURS[kind], scheme)) for kind in seen[scheme][1]}
        page.value("document.getElementById('theme').click()")
        seen[f"{scheme} toggled"] = shown(page)
        page.value("document.getElementById('theme').click()")
        assert shown(page) == seen[scheme]
    assert sum(seen["light"][0]) > 700 and sum(seen["dark"][0]) < 100
    assert seen["light toggled"] == seen["dark"] and seen["dark toggled"] == seen["light"]


def test_what_is_painted(show):
    """Screenshots have the chart's colours where the data puts them."""
    check = sample("tight_h100")
    for scheme in ("light", "dark"):
        page = show(check, scheme=scheme, width=600)
        left, top, width, height = page.value("""(({left, top, width, height}) => [left + scrollX, top + scrollY, width, height])
            (document.querySelector('.plot svg').getBoundingClientRect())""")
        # Near the middle of the schedule, a third up: far inside what the forward pass saved. High up at its start: the sheet.
        assert painted(page, left + 0.46 * width, top + height * 2 / 3) == rgb(getattr(COLOURS["saved"], scheme))
        assert (sum(painted(page, left + 0.05 * width, top + height / 5)) > 700) == (scheme == "light")


def test_reading_the_chart_with_pointer_and_keys(show):
    check = sample("fits_v5p")
    page = show(check)
    assert page.value("document.querySelector('.tip').hidden && document.querySelector('.cursor').hidden")
    x, y = page.value(
        """(({left, top, width, height}) => [left + width / 2, top + height / 2])
        (document.querySelector('.plot').getBoundingClientRect())"""
    )
    page.value(f"scrollTo(0, {y} - 300)")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=300)
    points = check["timeline"][0]["points"]
    middle = [point for point in points if point["t"] <= points[-1]["t"] / 2][-1]
    text = page.value("document.querySelector('.tip').innerText")
    assert f"at {middle['t']:,}" in text and f"{middle['bytes'] / 1024**3:.2f} GiB" in text
    assert f"saved activations\t{middle['by_kind']['saved'] / 1024**3:.2f} GiB" in text
    page.value("document.querySelector('.plot').focus()")
    for key, point in (("Home", points[0]), ("ArrowRight", points[1]), ("End", points[-1]), ("ArrowLeft", points[-2])):
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        assert f"at {point['t']:,}" in page.value("document.querySelector('.tip').innerText")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert page.value("document.querySelector('.tip').hidden")


def test_in_print_nothing_is_cut_off(show):
    page = show(sample("fits_v5p"), width=700, scheme="dark")
    page.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    try:
        assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.value("getComputedStyle(document.getElementById('theme')).display") == "none"
        wide = """[...document.querySelectorAll('table')].filter(t => t.getBoundingClientRect().right > innerWidth + 1)
            .map(t => t.innerText)"""
        assert page.value(wide) == []
    finally:
        page.call("Emulation.setEmulatedMedia", media="")

"""The section of the HTML report that says how each number was obtained."""

from jaxmem.report.markup import Markup, element, join
from jaxmem.report.reading import Check, source
from jaxmem.report.units import UNKNOWN, bytes_text, count_text, duration_text, percent_text, scaled_text, seconds_text

WAYS = {
    "compile": "from the compiler for the real target: its verdict, its sizes, its scheduled program",
    "estimate": "computed from shapes, hardware data and the compiler's schedule by a model",
    "measure": "observed on devices",
}
MFU = (
    "MFU is model FLOPs / (step seconds x devices x dense peak of the compute dtype); model FLOPs are 6 x parameters without the "
    "input embedding x tokens + 12 x layers x heads x head size x sequence x tokens. Of images the patches are the tokens, and a "
    "classifier's head counts once an image."
)


def provenance(check: Check) -> Markup:
    """Figure, value and source, then the backend, the versions and the flags that shaped them."""
    figures = [
        ("verdict", check["verdict"].replace("_", " "), "over all programs"),
        ("peak_bytes", bytes_text(check["peak_bytes"]), "peak of the worst program on one device"),
        ("usable_bytes", bytes_text(check["usable_bytes"]), check["usable_note"] or "what one device has to give"),
        ("capacity_bytes", bytes_text(check["capacity_bytes"]), "memory of one device by its data sheet"),
        ("headroom_bytes", bytes_text(check["headroom_bytes"]), "usable - peak"),
        ("host_bytes", bytes_text(check["host_bytes"]), "host memory of the worst program, for one host"),
        (
            "composition",
            f"{count_text(len(check['composition']))} parts" if check["composition"] else UNKNOWN,
            "live buffers at the peak by kind and module",
        ),
        ("unattributed_bytes", bytes_text(check["unattributed_bytes"]), "what of the peak has no kind and module"),
        (
            "buffers",
            f"{count_text(len(check['buffers']))} listed" if check["buffers"] else UNKNOWN,
            "largest live buffers at the peak",
        ),
        (
            "timeline",
            f"{count_text(sum(len(entry['points']) for entry in check['timeline']))} points" if check["timeline"] else UNKNOWN,
            "live bytes along the schedule",
        ),
        ("step_s", seconds_text(check["step_s"]), "one training step"),
        ("tokens_per_s", count_text(check["tokens_per_s"]), "over all devices"),
        ("mfu", percent_text(check["mfu"]), "as defined below"),
        (
            "seconds_by_limit",
            f"{count_text(len(check['seconds_by_limit']))} terms" if check["seconds_by_limit"] else UNKNOWN,
            "what a step waits for",
        ),
        ("traffic", f"{count_text(len(check['traffic']))} kinds" if check["traffic"] else UNKNOWN, "collectives of a step"),
        ("parameters", scaled_text(check["parameters"]), "of the model"),
        ("model_flops", scaled_text(check["model_flops"]), "FLOPs of a step over all devices"),
    ]
    rows = []
    for key, value, meaning in figures:
        how = source(check, key) if value != UNKNOWN else None
        finer = [
            f"{path.removeprefix(key + '.')}: {kind}"
            for path, kind in check["sources"].items()
            if path.startswith(key + ".") and value != UNKNOWN
        ]
        rows.append(
            element(
                "tr",
                element("td", element("code", key), class_="keep"),
                element("td", value, class_="number"),
                element("td", element("span", how, class_=f"source {how}") if how else UNKNOWN),
                element("td", "; ".join([meaning, *finer]), class_="quiet"),
            )
        )
    head = element(
        "tr",
        *(
            element("th", name, scope="col", class_="number" if name == "Value" else None)
            for name in ("Figure", "Value", "By", "What it is")
        ),
    )
    table = element("div", element("table", element("thead", head), element("tbody", rows)), class_="scroll")
    ways = element("p", *(join([element("b", kind), Markup(f": {text}. ")]) for kind, text in WAYS.items()), class_="lead")
    versions = [element("li", element("span", name), element("b", version or UNKNOWN)) for name, version in check["versions"].items()]
    within = f"in {duration_text(check['wall_s'])}" if check["wall_s"] is not None else "in a time that is not known"
    cached = ", every program answered from the cache" if check["cached"] else ""
    took = f"Checked {within}{cached}, as backend "
    flags = join([element("h3", "Compiler flags"), element("p", element("code", " ".join(check["flags"])))]) if check["flags"] else None
    return element(
        "section",
        element("header", element("h2", "How each number was obtained")),
        ways,
        table,
        element("h3", "Backend and versions"),
        element("p", took, element("b", check["backend"] or UNKNOWN), "."),
        element("ul", versions, class_="legend"),
        flags,
        element("h3", "Conventions"),
        element("p", "A dash is unknown, never zero. KiB, MiB, GiB are powers of 1024. ", MFU, class_="quiet"),
        class_="sheet long",
    )

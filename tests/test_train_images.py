"""Training on images: what it learns, what an evaluation says, and that saving, resuming, other meshes and export know these models."""

import json

import numpy as np
import pytest
import training

from jaxmem.checkpoint.formats import read, write
from jaxmem.checkpoint.formats.saved import saved_params
from jaxmem.data import open_for
from jaxmem.data.images import digits
from jaxmem.report import run_page
from jaxmem.runs.reading import read_run
from jaxmem.runs.summary import summarize
from jaxmem.spec import InputError
from jaxmem.workload import Workload

IMAGES = {"model": "mlp", "data": "images:digits", "plan": "data=2,fsdp=2,tensor=2", "batch": "64", "seq": None, "steps": "60",
          "checkpoint_every": "20", "eval_every": "30"}
VIT = IMAGES | {"model": "vit-tiny", "plan": "data=2,fsdp=2,tensor=2,remat=block", "steps": "4", "checkpoint_every": "2", "eval_every": "4"}


pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("images") / "run"
    assert training.train_here(out, print_hash=True, **IMAGES) == 0
    return out


def logits_on_the_host(params, images: np.ndarray) -> np.ndarray:
    """The MLP in float64."""
    x = images.reshape(len(images), -1).astype(np.float64)
    for layer in (0, 1):
        x = np.maximum(x @ params[f"hidden_{layer}"]["weights"] + params[f"hidden_{layer}"]["bias"], 0)
    return x @ params["head"]["weights"] + params["head"]["bias"]


def test_it_learns_digits_and_says_the_accuracy(trained, tmp_path):
    """Held-out loss and accuracy of the last evaluation, against the exported weights' own on the host."""
    lines = training.metrics(trained, "eval")
    assert [line["step"] for line in lines] == [30, 60] and all(line["images"] == 85 for line in lines)
    assert lines[-1]["accuracy"] > 0.85 and "tokens" not in lines[-1]
    saved = saved_params(trained / "checkpoints")
    _, params = read(write(tmp_path / "weights", saved.workload.model, saved.params, layout="jaxmem"))
    held = open_for(saved.workload, "images:digits", split="eval")
    rows = [held.row(i) for i in range(held.rows)]
    labels = np.array([row["labels"] for row in rows])
    logits = logits_on_the_host(params, np.stack([row["images"] for row in rows]))
    top = np.sort(logits, -1)
    close = (top[:, -1] - top[:, -2] < 0.1).sum()  # the run computes in bf16, where these could be either
    assert abs((logits.argmax(-1) == labels).sum() - lines[-1]["accuracy"] * 85) <= close < 8
    loss = (np.log(np.exp(logits).sum(-1)) - logits[np.arange(85), labels]).mean()
    assert lines[-1]["loss"] == pytest.approx(loss, rel=0.02)
    summary = summarize(read_run(trained))
    assert summary.eval_accuracy == lines[-1]["accuracy"]
    assert f"Evaluation accuracy</span><b>{100 * lines[-1]['accuracy']:.1f}%" in run_page.render(trained)
    first = training.metrics(trained)[0]
    assert first["tokens_per_s"] is None or first["tokens_per_s"] == pytest.approx(64 / first["step_s"])


def test_stopped_and_gone_on_it_ends_the_same(trained, tmp_path):
    out = tmp_path / "run"
    assert training.train_here(out, print_hash=True, fault="term:step=33", **IMAGES) == 75
    assert training.train_here(out, print_hash=True, **IMAGES) == 0
    assert [event["restored_from"] for event in training.events(out, "start")] == [None, 33]
    assert training.final_hash(out) == training.final_hash(trained)


@pytest.mark.parametrize(("flags", "plan"), [(IMAGES | {"steps": "6", "eval_every": "6"}, "fsdp=2"),
                                             pytest.param(VIT, "fsdp=2,remat=dots", marks=pytest.mark.long)])
def test_it_goes_on_on_another_mesh(tmp_path, flags, plan):
    """Stopped in the middle and resumed under another plan on two devices: the losses of the run that was not."""
    exact = flags | {"plan": flags["plan"] + ",compute=f32"}
    assert training.train_here(tmp_path / "a", **exact) == 0
    assert training.train_here(tmp_path / "b", fault="term:step=2", **exact) == 75
    other = exact | {"topology": "cpu:2", "plan": plan + ",compute=f32", "elastic": True}
    assert training.train_here(tmp_path / "b", **other) == 0
    losses = [[line["loss"] for line in training.metrics(tmp_path / name)] for name in ("a", "b")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
    evaluated = [training.metrics(tmp_path / name, "eval")[-1] for name in ("a", "b")]
    assert evaluated[0]["loss"] == pytest.approx(evaluated[1]["loss"], rel=2e-5)


def test_weights_begin_another_run(trained, tmp_path):
    saved = saved_params(trained / "checkpoints")
    folder = write(tmp_path / "weights", saved.workload.model, saved.params, layout="jaxmem")
    assert json.loads((folder / "config.json").read_text())["architecture"] == "mlp"
    one_step = IMAGES | {"steps": "1", "eval_every": "1", "lr": "1e-9", "warmup": "0"}
    assert training.train_here(tmp_path / "run", **one_step | {"init_from": folder}) == 0
    assert training.metrics(tmp_path / "run", "eval")[0]["accuracy"] == training.metrics(trained, "eval")[-1]["accuracy"]
    with pytest.raises(InputError, match="holds another model than --model=vit-tiny: mlp"):
        training.train_here(tmp_path / "other", **VIT | {"init_from": folder})
    with pytest.raises(InputError, match="holds another model than --model=mlp,mlp=64: mlp=128"):
        training.train_here(tmp_path / "other", **IMAGES | {"model": "mlp,mlp=64", "init_from": folder})


@pytest.mark.parametrize(("model", "data", "expected"), [
    ("mlp", "text:pydoc", "text:pydoc gives tokens, and mlp takes images, labels; there are images:digits"),
    ("vit-tiny", "synthetic", "synthetic gives tokens, and vit-tiny takes images, labels"),
    ("mlp", "images:digits=0.5+text:pydoc=0.5", "text:pydoc gives tokens"),
    ("mlp,height=28,width=28", "images:digits", "8x8x1 .* takes 28x28x1; with height=8,width=8,channels=1 it would take these"),
    ("vit-tiny,classes=9", "images:digits", "have 10 classes, and the model has classes=9"),
    ("mlp", "images:digit", "did you mean digits"),
])
def test_data_that_does_not_fit_is_one_message(model, data, expected):
    with pytest.raises(InputError, match=expected) as error:
        open_for(Workload.parse(model=model, batch=8), data)
    assert len(str(error.value).splitlines()) == 1


def test_images_are_not_for_a_decoder():
    with pytest.raises(InputError, match="gives images, labels, and decoder-tiny takes tokens, targets, segment_ids, positions"):
        open_for(Workload.parse(model="decoder-tiny", batch=8, seq=32), "images:digits")


def test_images_as_bytes():
    data, floats = (open_for(Workload.parse(model=f"mlp,image_dtype={dtype}", batch=8), "images:digits") for dtype in ("uint8", "f32"))
    row = data.row(5)["images"]
    assert row.dtype == np.uint8 == data.fields["images"][1] and row.max() == 255
    np.testing.assert_allclose(row / 255, floats.row(5)["images"], atol=0.5 / 255)
    assert data.fingerprint != floats.fingerprint


def test_fewer_classes_than_the_model_has_is_no_problem():
    data = open_for(Workload.parse(model="mlp,classes=12", batch=8), "images:digits")
    assert data.rows == 1712 and digits()[1].max() == 9


@pytest.mark.long
@pytest.mark.parametrize(("flags", "least"), [
    ({"model": "mlp", "plan": "data=8", "steps": "300"}, 0.94),
    ({"model": "vit-tiny", "plan": "data=2,fsdp=2,tensor=2,remat=block", "steps": "600", "lr": "0.002"}, 0.92)])
def test_held_out_accuracy_of_longer_runs(tmp_path, flags, least):
    """85 held-out digits: one more or less is 1.2%."""
    assert training.train_here(tmp_path / "run", **IMAGES | {"eval_every": "100", "checkpoint_every": "0"} | flags) == 0
    assert training.metrics(tmp_path / "run", "eval")[-1]["accuracy"] >= least

"""The Trainer of every supported version has, and calls, every method that a private run overrides.

The tests read the sources of the versions and import none. ``make overrides`` fetches one version
of every minor release into the folder that ``DP_GRAPE_WHEELS`` names. Without this folder, only the
installed version is read.
"""

import ast
import configparser
import functools
import inspect
import os
import re
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from transformers import Trainer

from dp_grape_hf import DPGrapeTrainer, PrivacyError
from dp_grape_hf.publishing import declare
from dp_grape_hf.trainer.mixin import DPGrapeMixin
from dp_grape_hf.trainer.override_checks import OVERRIDES
from tests.support.trainers import make_trainer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = os.environ.get("DP_GRAPE_WHEELS")
WHEELS = {} if FOLDER is None else {p.name.split("-")[1]: p for p in Path(FOLDER).glob("*.whl")}
VERSIONS = {transformers.__version__: Path(transformers.__file__).parent, **WHEELS}
NOT_CALLED = {"train", "predict", "hyperparameter_search"}  # but by users
UPLOADS = {
    *("upload_file", "upload_folder", "upload_large_folder", "preupload_lfs_files"),
    *("create_commit", "create_commits_on_pr", "sync_bucket", "batch_bucket_files"),
}
"""The methods of ``huggingface_hub.HfApi`` that send files."""

of_each_version = pytest.mark.parametrize("version", VERSIONS)


def overrides():
    """Name -> what the mixins define under it; the first in the order of resolution."""
    ours = [cls for cls in DPGrapeMixin.__mro__ if cls is not object]
    return {name: value for cls in ours for name, value in vars(cls).items() if name[:2] != "__"}


@functools.cache
def modules(version):
    """Name -> what is in each ``trainer*.py`` of a version of transformers."""
    where = VERSIONS[version]
    if where.is_dir():
        texts = {path.name: path.read_text() for path in where.glob("trainer*.py")}
    else:
        with zipfile.ZipFile(where) as wheel:
            names = [n for n in wheel.namelist() if re.fullmatch(r"transformers/trainer\w*\.py", n)]
            texts = {Path(name).name: wheel.read(name).decode() for name in names}
    return {name: ast.parse(text) for name, text in texts.items()}


def functions(module):
    """Yields the functions of a module and the methods of its classes, with their full names."""
    for outer in module.body:
        for node in outer.body if isinstance(outer, ast.ClassDef) else [outer]:
            if isinstance(node, ast.FunctionDef):
                yield f"{outer.name}." * (node is not outer) + node.name, node


def methods(version, module="trainer.py", cls="Trainer"):
    found = functions(modules(version)[module])
    return {name.partition(".")[2]: node for name, node in found if name.startswith(f"{cls}.")}


def attributes(node, of=None):
    """The names of all attributes in a node, or of those of one variable: what it may call."""
    found = (n for n in ast.walk(node) if isinstance(n, ast.Attribute))
    return {
        n.attr for n in found if of is None or (isinstance(n.value, ast.Name) and n.value.id == of)
    }


def uncalled(module):
    """The overridden methods that no other method reads from ``self``."""
    read = [(name.partition(".")[2], attributes(node, "self")) for name, node in functions(module)]
    return {
        name for name in OVERRIDES if not any(name in of for other, of in read if other != name)
    }


def misfit(host, ours):
    """What of a host's method its replacement does not take; None if it takes all."""
    names = [a.arg for a in (*host.posonlyargs, *host.args)]
    wants = [a.arg for a in host.kwonlyargs] + ["..."] * (host.kwarg is not None)
    least = names[: len(names) - len(host.defaults)]
    needed = [a for a, d in zip(host.kwonlyargs, host.kw_defaults, strict=True) if d is None]
    try:
        ours.bind(*names, *(["..."] if host.vararg else []), **dict.fromkeys(wants))
        ours.bind(*least, **{a.arg: None for a in needed})
        ours.bind(names[0], **dict.fromkeys(names[1:]))
    except TypeError as error:
        return str(error)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [p.name for p in ours.parameters.values() if p.kind not in variadic]
    pairs = zip(names, own, strict=False)  # either may have more
    return next((f"{a!r} stands where {b!r} does" for a, b in pairs if a != b), None)


@pytest.mark.parametrize("name", ["training_step", "_load_best_model", "_push_from_checkpoint"])
def test_a_host_that_lost_a_seam_is_refused(name, monkeypatch, tmp_path):
    monkeypatch.setattr(Trainer, f"{name}_of_another_name", getattr(Trainer, name), raising=False)
    monkeypatch.delattr(Trainer, name)
    with pytest.raises(PrivacyError, match=rf"{transformers.__version__} has no {name}\(\), which"):
        make_trainer(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("get_train_dataloader", "_get_train_sampler", "_get_dataloader"),
        *("get_optimizer_cls_and_kwargs", "create_optimizer_and_scheduler"),
        *("_prepare_inputs", "_prepare_input", "get_batch_samples"),
    ],
)
def test_a_forbidden_override_is_refused_before_data(name, tmp_path):
    cls = type("Own", (DPGrapeTrainer,), {name: lambda *args, **kwargs: None})
    with pytest.raises(PrivacyError, match=rf"Own overrides {name}\(\)"):
        make_trainer(tmp_path, cls=cls, train_dataset=object())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_batch_that_training_step_changes_is_refused(in_place, tmp_path):
    class Own(DPGrapeTrainer):
        def training_step(self, model, inputs, *args):
            for physical in inputs:
                x = physical["x"]
                physical["x"] = x.sub_(x.mean(0)) if in_place else x - x.mean(0)
            return super().training_step(model, inputs, *args)

    with pytest.raises(PrivacyError, match=r"training_step\(\) of Own received another batch"):
        make_trainer(tmp_path, cls=Own).train()


def test_an_optimizer_of_a_subclass_is_refused_by_name(tmp_path):
    class Own(DPGrapeTrainer):
        def create_optimizer(self, *args, **kwargs):
            self.optimizer = torch.optim.SGD(self.model.parameters())
            return self.optimizer

    with pytest.raises(PrivacyError, match=r"Own\.create_optimizer\(\)"):
        make_trainer(tmp_path, cls=Own).train()


@pytest.mark.skipif(FOLDER is None, reason="`make overrides` fetches the other versions")
def test_every_supported_minor_release_is_read():
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg")
    bounds = re.search(
        r"transformers>=(\d+)\.(\d+),<(\d+)$", config["options"]["install_requires"], re.M
    )
    assert bounds is not None
    major, oldest, after = map(int, bounds.groups())
    assert after == major + 1
    newest = max(int(v.split(".")[1]) for v in VERSIONS)
    assert newest >= int(transformers.__version__.split(".")[1])
    read = {tuple(map(int, v.split(".")[:2])) for v in WHEELS}
    assert read == {(major, minor) for minor in range(oldest, newest + 1)}


@of_each_version
def test_exactly_the_listed_overrides_exist_in_the_trainer(version):
    names, subclass = overrides().keys(), methods(version, "trainer_seq2seq.py", "Seq2SeqTrainer")
    assert set(OVERRIDES) == names & methods(version).keys()
    assert names & subclass.keys() <= set(OVERRIDES)


@of_each_version
def test_the_trainer_calls_every_overridden_method(version):
    assert uncalled(modules(version)["trainer.py"]) == NOT_CALLED


@of_each_version
@pytest.mark.parametrize(
    ("module", "cls"), [("trainer.py", "Trainer"), ("trainer_seq2seq.py", "Seq2SeqTrainer")]
)
def test_our_methods_take_what_those_of_the_trainer_take(version, module, cls):
    theirs, ours = methods(version, module, cls), overrides()
    found = {
        name: misfit(theirs[name].args, inspect.signature(ours[name]))
        for name in OVERRIDES
        if name in theirs
    }
    assert len(found) == len(OVERRIDES) or cls != "Trainer"
    assert not {name: why for name, why in found.items() if why is not None}


@of_each_version
def test_the_card_takes_what_that_of_the_trainer_takes(version):
    parameters = list(inspect.signature(declare).parameters.values())[1:]  # but the details
    parameters[0] = parameters[0].replace(name="self")
    host = methods(version)["create_model_card"].args
    assert misfit(host, inspect.Signature(parameters)) is None


@of_each_version
def test_the_trainer_uploads_only_where_we_stand_in_its_place(version):
    found = {
        name
        for module in modules(version).values()
        for name, function in functions(module)
        if attributes(function) & UPLOADS
    }
    assert found == {"Trainer.push_to_hub", "Trainer._push_from_checkpoint"}
    for name in ("push_to_hub", "_push_from_checkpoint"):
        assert name in OVERRIDES
        assert f"super().{name}" not in inspect.getsource(getattr(DPGrapeTrainer, name))


def test_trl_has_what_its_private_trainer_replaces_and_uploads_nothing():
    pytest.importorskip("trl", reason="TRL is an optional extra")
    from dp_grape_hf import DPGrapeSFTTrainer

    theirs = [c for c in DPGrapeSFTTrainer.__mro__ if c.__module__.partition(".")[0] == "trl"]
    names = {name for cls in theirs for name in vars(cls)}
    sources = [ast.parse(inspect.getsource(inspect.getmodule(cls) or cls)) for cls in theirs]
    used = set().union(*map(attributes, sources))
    own = [c for c in DPGrapeSFTTrainer.__mro__ if c.__module__ == DPGrapeSFTTrainer.__module__]
    ours = {n for cls in own for n, value in vars(cls).items() if inspect.isfunction(value)}
    assert ours
    assert ours <= names & (used | NOT_CALLED)
    assert overrides().keys() & names <= set(OVERRIDES)
    assert not used & UPLOADS


@pytest.mark.parametrize(
    ("host", "fits"),
    [
        ("self, output_dir", True),
        ("self, output_dir, trial", False),
        ("self, folder", False),
        ("self, output_dir, *, trial=None", False),
        ("self, output_dir, **kwargs", False),
    ],
)
def test_another_signature_is_seen(host, fits):
    function = ast.parse(f"def f({host}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    ours = inspect.signature(DPGrapeMixin._save_rng_state)
    assert (misfit(function.args, ours) is None) is fits


def test_a_seam_that_nobody_calls_is_seen():
    text = inspect.getsource(transformers.trainer)
    text = text.replace("self._save_rng_state(", "self._save_random_state(")
    assert uncalled(ast.parse(text)) == NOT_CALLED | {"_save_rng_state"}

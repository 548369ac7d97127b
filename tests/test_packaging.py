"""The packages for PyPI: what is in them, what they say of themselves, and that they run."""

import configparser
import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

import dp_grape_hf
from recipes.site.distributions import copy_published
from recipes.site.links import ROOT, repository


def run(command, folder, **environment):
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(what, source, folder):
    python = [sys.executable, "-m", "build", "--no-isolation", f"--{what}"]
    run([*python, "--outdir", str(folder), str(source)], ROOT)
    (made,) = folder.iterdir()
    return made


def contents(wheel):
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def metadata_of(files):
    (name,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(files[name])


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """What is published, as it is handed to the builder."""
    folder = tmp_path_factory.mktemp("tree")
    copy_published(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_contains_exactly_the_files_of_the_package(wheel):
    package = ROOT / "dp_grape_hf"
    ours = {path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    expected = {path.relative_to(ROOT).as_posix() for path in ours}
    assert {"dp_grape_hf/py.typed", "dp_grape_hf/publishing/card.md"} < expected
    files = contents(wheel)
    assert {name for name in files if ".dist-info/" not in name} == expected
    assert all(files[name] == (ROOT / name).read_bytes() for name in expected)


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(tree, wheel, tmp_path):
    with tarfile.open(build("sdist", tree, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert not (source / "tests").exists()
    again = build("wheel", source, tmp_path / "wheel")
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


@pytest.mark.slow
def test_an_installed_wheel_is_imported_and_has_the_command(wheel, tmp_path):
    place = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
    run([*pip, "--disable-pip-version-check", "--target", str(place), str(wheel)], tmp_path)
    found = run(
        [
            *(sys.executable, "-c"),
            "import dp_grape_hf, importlib.metadata as m; "
            "print(dp_grape_hf.__file__, dp_grape_hf.__version__, m.version('dp_grape_hf'), "
            "dp_grape_hf.DPGrapeTrainer.__name__)",
        ],
        tmp_path,
        PYTHONPATH=str(place),
    )
    version = dp_grape_hf.__version__
    imported = place / "dp_grape_hf" / "__init__.py"
    assert found.split() == [str(imported), version, version, "DPGrapeTrainer"]
    command = str(place / "bin" / "dp-grape")
    assert "verify" in run([command, "--help"], tmp_path, PYTHONPATH=str(place))


@pytest.mark.slow
def test_the_metadata_say_whose_it_is_and_where(wheel):
    said = metadata_of(contents(wheel))
    assert said["Description-Content-Type"] == "text/markdown"
    addresses = dict(line.split(", ") for line in said.get_all("Project-URL", []))
    assert addresses.keys() == {"Repository", "Documentation", "Changelog", "Issues"}
    assert all(address.startswith(repository()) for address in addresses.values())
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg")
    assert {*said.get_all("Provides-Extra", [])} == config["options.extras_require"].keys()


@pytest.mark.slow
def test_the_description_is_the_readme_with_absolute_links(wheel):
    description = metadata_of(contents(wheel)).get_payload(decode=True).decode("utf-8")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    page = re.sub(r"<!--.*?-->\n", "", page)
    page = page.replace("[!WARNING]", "**Warning:**").replace("[!IMPORTANT]", "**Important:**")
    targets = re.compile(r"\]\(([^)\s]+)\)")
    assert len(targets.findall(description)) == len(targets.findall(page)) > 10
    assert all(target.startswith("https://") for target in targets.findall(description))
    assert targets.sub("", description).strip() == targets.sub("", page).strip()
    for address in targets.findall(description):
        path, blob, place = address.partition(f"{repository()}/blob/main/")
        assert not blob or (ROOT / place.partition("#")[0]).is_file(), path

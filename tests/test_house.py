"""The rules of the repository, read from the sources: imports, names, and committed files."""

import ast
import configparser
import re
import shutil
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "dp_grape_hf"

# A subpackage (or a module next to them) imports only from the lines above its line, and only the
# public names of another subpackage, which its __init__ imports.
LAYERS = (
    ("errors", "phases", "tables"),
    ("options",),
    ("distributed",),
    ("sharding",),
    ("accounting", "projections"),  # mathematics: no model, no data, no file
    ("ledger", "gradients", "optimizers"),  # record, per-sample gradients, updates
    ("choosing",),  # default hyperparameters
    ("mechanism", "arguments", "publishing"),  # private updates, options, model card
    ("trainer",),  # the Hugging Face loop
    ("memory", "auditing"),  # tools around a run
    ("cli",),
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}

# The libraries that only some places know, so that the rest can be read and tested without them.
ONLY_IN = {
    "torch": {*LAYER_OF} - {"accounting", "errors", "options", "phases", "tables"},
    "transformers": {
        *("gradients.rules", "gradients.definition"),
        *("projections.targets", "arguments", "publishing", "trainer", "memory"),
        "cli.suggest",
    },
    "trl": {"trainer.sft", "trainer.preferences"},
    "datasets": set[str](),
    "evaluate": set[str](),
    "unittest": set[str](),
    "recipes": set[str](),
    "tests": set[str](),
}

# Where the name to import and the name to install differ.
DISTRIBUTIONS = {"yaml": "pyyaml"}

TOP_LEVEL = {
    *(".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md"),
    *("pyproject.toml", "setup.cfg", "SECURITY.md", "CITATION.cff", ".github"),
    ".pre-commit-config.yaml",
    *("dp_grape_hf", "model_cards", "recipes", "tests"),
}
# Words with which no sentence of its own begins.
SUBORDINATE = {*"How If That Those What When Where Whether Which Who Whoever Whose".split()}
# of the name of a test, without the prefix "test_"
MOST_WORDS = 10
# A path of one machine means nothing on the next; "facebook/opt-125m" is not one.
MACHINE_PATH = re.compile(r"(?<![\w.\-{}])/(?:work|root|opt|home|Users)/")


def modules_of(folder):
    """The modules below a top-level folder, by dotted name; a package has that of its folder."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


MODULES = modules_of(PACKAGE)
OTHERS = modules_of("recipes") | modules_of("tests")
EVERY = MODULES | OTHERS
PUBLISHED = MODULES | modules_of("recipes")


def subpackage_of(module):
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] or None if package == PACKAGE else None


@cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path):
    """Every import of a file as a module and the name taken from it, "" for the module itself."""
    return tuple(_imports(path))


def _imports(path):
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: import by the whole name, not relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in EVERY else (node.module or "", alias.name)


def libraries(path):
    return {module.partition(".")[0] for module, _ in imports(path)}


def tracked_files():
    """What git tracks, or a skip where there is no checkout."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout: there is no list of committed files to look at")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip(f"git cannot list the files: {listed.stderr.strip()}")
    return [Path(name) for name in listed.stdout.split("\0") if name]


def assert_none(wrong, what):
    found = {module: sorted(names) for module, names in wrong.items() if names}
    assert not found, f"{what}: {found}"


@pytest.mark.parametrize("folder", [PACKAGE, "recipes", "tests"])
def test_every_folder_of_modules_is_a_package(folder):
    folders = {path.parent for path in (ROOT / folder).rglob("*.py")}
    missing = {place.name for place in folders if not (place / "__init__.py").exists()}
    assert not missing, f"no wheel would hold {', '.join(sorted(missing))}: add __init__.py"


def test_a_subpackage_imports_only_from_lower_layers():
    names = {name for name in map(subpackage_of, MODULES) if name}
    assert names <= {*LAYER_OF}, "add the subpackage to LAYERS, above all that import it"
    wrong = {}
    for module, path in MODULES.items():
        if inside := subpackage_of(module):
            used = {subpackage_of(name) or "" for name, _ in imports(path) if name in MODULES} - {
                inside
            }
            wrong[module] = {other for other in used if LAYER_OF.get(other, 99) >= LAYER_OF[inside]}
    assert_none(wrong, "these subpackages may not be imported there")


def test_another_subpackage_is_imported_by_its_public_names():
    wrong = {
        module: {
            name
            for name, _ in imports(path)
            if name in MODULES
            and name.count(".") > 1
            and subpackage_of(name) != subpackage_of(module)
        }
        for module, path in PUBLISHED.items()
    }
    assert_none(wrong, "import from the subpackage itself")


def underscored(path):
    """The names with an underscore that a module takes from another one."""
    taken = {
        f"{name}.{taken}" for name, taken in imports(path) if name in MODULES and taken[:1] == "_"
    }
    ours = {
        alias.asname or alias.name
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE
        for alias in node.names
    }
    return taken | {
        f"{node.value.id}.{node.attr}"
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ours
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
    }


def test_a_name_with_an_underscore_stays_in_its_module():
    wrong = {module: underscored(path) for module, path in PUBLISHED.items()}
    assert_none(wrong, "a name with an underscore is used elsewhere")


def test_no_import_leads_back():
    graph = {
        module: {name for name, _ in imports(path) if name in MODULES and name != module}
        for module, path in MODULES.items()
        if module != PACKAGE
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_test_module_is_imported():
    wrong = {
        module: {
            name
            for name, _ in imports(path)
            if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")
        }
        for module, path in modules_of("tests").items()
    }
    assert_none(wrong, "move what is shared to tests/support")


def test_a_docstring_begins_with_an_imperative_or_a_noun():
    wrong = {
        module: {
            f"{getattr(node, 'name', 'module')}: {text.partition(chr(10))[0]}"
            for node in nodes(path)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and (text := ast.get_docstring(node) or "").split(" ", 1)[0] in SUBORDINATE
        }
        for module, path in MODULES.items()
    }
    assert_none(wrong, "ruff (D401) checks verbs; write 'Return whether' or 'True if'")


def test_no_name_of_a_test_has_more_than_ten_words():
    wrong = {
        module: {
            node.name
            for node in nodes(path)
            if isinstance(node, ast.FunctionDef)
            and node.name.startswith("test_")
            and len(node.name.removeprefix("test_").split("_")) > MOST_WORDS
        }
        for module, path in modules_of("tests").items()
    }
    assert_none(wrong, f"state the property in at most {MOST_WORDS} words")


def test_a_library_is_imported_only_where_it_belongs():
    wrong = {
        module: {
            name
            for name in libraries(path) & ONLY_IN.keys()
            if not ONLY_IN[name] & {module.removeprefix(f"{PACKAGE}."), subpackage_of(module)}
        }
        for module, path in MODULES.items()
    }
    assert_none(wrong, "these libraries are known only in some places")


def test_no_module_imports_the_compiler():
    wrong = {
        module: {name for name, _ in imports(path) if name.startswith("torch._dynamo")}
        for module, path in MODULES.items()
    }
    assert_none(wrong, "it takes seconds of every start: look in sys.modules whether it was used")


def test_every_import_is_declared_in_setup_cfg():
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    declared = [config["options"]["install_requires"], *map(extras.get, ("sft", "plot"))]
    lines = "\n".join(declared).splitlines()
    known = {re.split(r"[<>=!~;\[ ]", line)[0].replace("-", "_") for line in lines if line}
    ours = {*sys.stdlib_module_names, PACKAGE}
    missing = {
        module: {DISTRIBUTIONS.get(name, name) for name in libraries(path) - ours} - known
        for module, path in MODULES.items()
    }
    assert_none(missing, "add to install_requires in setup.cfg")


def test_a_module_never_prints():
    wrong = {
        module: {
            f"line {node.lineno}"
            for node in nodes(path)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        }
        for module, path in MODULES.items()
    }
    assert_none(wrong, "use logging")


def test_only_the_known_entries_are_at_the_top():
    unknown = {path.parts[0] for path in tracked_files()} - TOP_LEVEL
    assert not unknown, f"move below a folder or delete: {', '.join(sorted(unknown))}"


def test_no_committed_file_names_a_path_of_one_machine():
    found = []
    for path in tracked_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # binary, or deleted and not yet committed
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line):
                found.append(f"{path}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["work", "root", "opt", "home"])
def test_a_path_of_one_machine_is_recognised(folder):
    assert MACHINE_PATH.search(f"see /{folder}/notes")
    assert MACHINE_PATH.search(f'path="/{folder}/notes"')
    assert not MACHINE_PATH.search(f"models/{folder}/125m and facebook/{folder}-125m")


def test_the_pinned_versions_can_be_installed_anywhere():
    pins = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    wrong = [
        line
        for line in pins
        if line and not line.startswith("#") and not re.fullmatch(r"[\w.-]+==\d[\w.]*", line)
    ]
    assert not wrong, f"an exact public version is name==1.2.3, not {wrong}"

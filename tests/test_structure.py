"""The promises of the README and of the tree."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from toys import ROOT, TOY, as_flags, toy_model

import train
from gpt import BLOCKS, GPT, ModelConfig
from gpt.pretrained import export
from gpt.training.settings import configure

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = README + "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))

PACKAGE = sorted((ROOT / "gpt").rglob("*.py"))


def imports(path):
    """(module, name of the function it is imported in or None) of all that a file imports, as gpt.training.data."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(node): function.name for function in tree.body if isinstance(function, ast.FunctionDef)
              for node in ast.walk(function)}  # fmt: skip
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from ((name, inside.get(id(node))) for name in names)


def rooms():
    """(file as gpt/training/data.py, what it imports, function) for all imports of the package and the scripts."""
    for path in [*PACKAGE, *ROOT.glob("*.py")]:
        for name, function in imports(path):
            yield path.relative_to(ROOT).as_posix(), name, function


def test_the_model_imports_neither_runs_nor_studies():
    """But for `main`, the command python -m gpt.pretrained."""
    for file, name, function in rooms():
        if re.fullmatch(r"gpt/\w+\.py", file) and function != "main":
            assert not name.startswith(("gpt.training", "gpt.study")), (file, name)


def test_runs_and_studies_do_not_import_each_other():
    """But for the trainer, which measures depth profiles along training."""
    for file, name, _ in rooms():
        if file.startswith("gpt/study/"):
            assert not name.startswith("gpt.training"), (file, name)
        if file.startswith("gpt/training/"):
            assert not name.startswith("gpt.study") or (file, name[:15]) == (
                "gpt/training/trainer.py",
                "gpt.study.depth",
            )


def test_nothing_imports_a_script_but_compare_which_trains():
    scripts = {script.removesuffix(".py") for script in SCRIPTS}
    imported = {(file, name.split(".")[0]) for file, name, _ in rooms() if name.split(".")[0] in scripts}
    assert imported == {("compare.py", "train")}


def test_who_reads_the_environment():
    for path in PACKAGE:
        if path.name not in ("distributed.py", "device.py"):
            assert not re.search(
                r"os\.environ|os\.getenv|sys\.argv(?!\[1:\]\)\n$)", path.read_text(encoding="utf-8")
            ), path


def functions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


CODE = [*PACKAGE, *sorted(ROOT.glob("*.py")), ROOT / "data" / "prepare.py"]


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_and_a_function_answer_one_question(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 250
    assert not re.search(r"^\s*(nonlocal|global) ", path.read_text(encoding="utf-8"), re.M) or path.name == "prepare.py"
    for function in functions(path):
        assert sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1 <= 60, function.name


def test_no_librarys_norm_no_pickle_and_no_clock_that_can_go_back():
    banned = r"layer_norm\(|nn\.LayerNorm|import pickle|torch\.load|(?<![\w.])(exec|eval)\(|time\.time"
    for path in [*(ROOT / "gpt").glob("*.py"), *ROOT.glob("*.py")]:
        assert not re.search(banned, path.read_text(encoding="utf-8")), path


def test_importing_the_package_does_not_import_torch():
    code = "import sys, gpt.config; assert 'torch' not in sys.modules; gpt.LayerNorm; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_sampling_does_not_wait_for_the_compiler(tmp_path):
    (tmp_path / "text.txt").write_text("norm " * 400, encoding="utf-8")
    train.train(
        configure(TOY | {"data": str(tmp_path / "text.txt"), "steps": 1, "warmup_steps": 0}), str(tmp_path / "r")
    )
    code = "import sys, sample; sys.exit = print; sample.main(['r', '--max-new-tokens', '3']); "
    code += "assert 'torch' in sys.modules and 'torch._dynamo' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env=environment)


def test_the_readmes_file_map_is_the_tree():
    section = README.split("## Files")[1].split("```")[1]
    listed = {line.split()[0] for line in section.splitlines() if line and not line.startswith(" ")}
    here = {path.name for path in ROOT.glob("*.py")} | {"gpt/" + path.name for path in (ROOT / "gpt").glob("*.py")}
    here |= {"configs/" + path.name for path in (ROOT / "configs").glob("*")} | {
        "data/prepare.py",
        "data/gpt2/",
        "docs/",
        "tests/",
        "benchmarks/speed.py",
    }
    assert listed == here - {"gpt/__init__.py"}


def test_the_readmes_table_of_placements_is_true():
    rows = {row[0].strip(" `"): row for row in (line.split("|")[1:-1] for line in README.splitlines()) if len(row) == 5}
    shape = {"vocab_size": 50257, "context_length": 1024, "n_layers": 12, "n_heads": 12, "d_model": 768}
    described = rows.keys() & BLOCKS.keys()
    assert len(described) == 11
    for norm in described:
        with torch.device("meta"):
            model = GPT(ModelConfig(norm=norm, **shape))
        assert rows[norm][2].strip() == ("yes" if hasattr(model.final_norm, "weight") else "no"), norm
        assert rows[norm][3].strip() == f"{model.count_parameters():,}", norm


def commands():
    """Every command of the sh blocks in the README and in docs/, the installation apart."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGES, re.S) for line in block.splitlines()]
    parts = [part.strip() for line in lines if line for part in line.split("#")[0].split("&&")]
    return [part for part in dict.fromkeys(parts) if not part.startswith("pip install")]


def test_the_lines_of_code_in_the_lesson_are_the_codes():
    code = "".join((ROOT / "gpt" / name).read_text(encoding="utf-8") for name in ("norms.py", "blocks.py"))
    section = README.split("## The lesson")[1].split("\n\n")
    (table,) = (part for part in section if part.startswith("| what |"))
    lines = [row.split("|")[3].strip(" `") for row in table.splitlines()[2:]]
    assert len(lines) == 7 and all(line in code for line in lines)


def test_ci_installs_and_tests_as_the_readme_says():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for line in ("pip install -r requirements.txt", "python -m pytest"):
        assert line in README and line in ci


RUNNER = """
import json, runpy, sys
sys.path.insert(0, "")
for command, arguments in json.load(sys.stdin):
    sys.argv = arguments[1:] if arguments[0] == "-m" else arguments
    try:
        (runpy.run_module if arguments[0] == "-m" else runpy.run_path)(sys.argv[0], run_name="__main__")
    except SystemExit as exit:
        if exit.code:
            sys.exit(f"{command}: {exit.code}")
"""


def test_the_readmes_commands_run(tmp_path):
    """In their order, in a copy of the tree, with toy sizes added to what trains."""
    for name in ("gpt", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "data" / "gpt2", tmp_path / "data" / "gpt2")
    shutil.copy(ROOT / "data" / "prepare.py", tmp_path / "data")
    for script in SCRIPTS:
        shutil.copy(ROOT / script, tmp_path)
    text = "It is a truth universally acknowledged.\n" * 800
    for name in ("my.txt", "data/shakespeare.txt", "texts/one.txt", "texts/two.txt"):  # the second as if downloaded
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    # A folder is read as a folder, so that this one stands for the weights of its name.
    export(toy_model(vocab_size=50257, context_length=256), tmp_path / "gpt2")
    toy = as_flags(TOY)
    lines = []
    for command in commands():
        program, *arguments = (word for word in shlex.split(command) if not word.startswith("TORCH_"))
        if program == "torchrun":  # here alone; tests/test_distributed.py starts several
            program, arguments = "python", arguments[arguments.index("train.py") :]
        assert program == "python", command
        if arguments[:2] == ["-m", "pytest"]:
            continue
        if arguments[0] in ("train.py", "compare.py"):
            arguments += ["--steps", "2", "--batch-size", "2", "--micro-batch-size", "1", "--eval-every", "2"]
            arguments += [] if "--init" in arguments else [*toy, "--val-fraction", "0.1"]
            arguments += ["--seeds", "1"] if arguments[0] == "compare.py" else []
            arguments += [] if {"--init", "configs/gpt2.toml"} & {*arguments} else ["--tokenizer", "bytes"]
        if "--n-layers" in arguments[1:] and arguments[0] == "probe.py":
            arguments += toy
        if "--probe-every" in arguments:
            arguments += ["--probe-every", "1"]
        lines.append([command, arguments])
    # One process for all, since most of the time of each would go to importing torch.
    result = subprocess.run(
        [sys.executable, "-c", RUNNER], input=json.dumps(lines), cwd=tmp_path, capture_output=True, encoding="utf-8"
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert {arguments[0] for _, arguments in lines if arguments[0] != "-m"} == {*SCRIPTS, "data/prepare.py"}


def test_the_readmes_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], cwd=ROOT, check=True)

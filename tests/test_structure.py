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

import gpt
import train
from gpt import BLOCKS, GPT, ModelConfig
from gpt.pretrained import export
from gpt.training.settings import configure

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = README + "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))

PACKAGE = sorted((ROOT / "gpt").rglob("*.py"))
CODE = [*PACKAGE, *sorted(ROOT.glob("*.py")), ROOT / "data" / "prepare.py"]


def code(path) -> str:
    return path.read_text(encoding="utf-8")


def imports():
    """(file as gpt/training/data.py, module as gpt.training.run.held, function it is imported in or None) for every
    import of the package and the scripts."""
    for path in CODE:
        tree, inside = ast.parse(code(path)), {}
        for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
            inside |= {id(node): function.name for node in ast.walk(function)}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((path.relative_to(ROOT).as_posix(), before + name, inside.get(id(node))) for name in names)


def test_the_model_imports_neither_runs_nor_studies():
    """But for `main`, the command python -m gpt.pretrained."""
    for file, name, function in imports():
        if file.startswith("gpt/") and file.count("/") == 1 and function != "main":
            assert not name.startswith(("gpt.training", "gpt.study")), (file, name)


def test_runs_and_studies_do_not_import_each_other():
    """But for the trainer, which measures depth profiles along training."""
    for file, name, _ in imports():
        if file.startswith("gpt/study/"):
            assert not name.startswith("gpt.training"), (file, name)
        if file.startswith("gpt/training/") and name.startswith("gpt.study"):
            assert file == "gpt/training/trainer.py" and name.startswith("gpt.study.depth"), (file, name)


def test_no_script_is_imported_but_train_by_compare():
    scripts = {script.removesuffix(".py") for script in SCRIPTS}
    imported = {(file, name.split(".")[0]) for file, name, _ in imports() if name.split(".")[0] in scripts}
    assert imported == {("compare.py", "train")}


def test_who_reads_the_environment_and_the_command_line():
    for path in PACKAGE:
        if path.name not in ("distributed.py", "device.py", "jobs.py", "plots.py"):
            assert "environ" not in code(path) and "getenv" not in code(path), path
        assert "sys.argv" not in code(path).replace('if __name__ == "__main__":\n    main(sys.argv[1:])\n', ""), path


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_and_a_function_answer_one_question(path):
    assert len(code(path).splitlines()) <= 250
    for node in ast.walk(ast.parse(code(path))):
        assert not isinstance(node, ast.Nonlocal | ast.Global), node.lineno
        if isinstance(node, ast.FunctionDef):
            assert sum(isinstance(each, ast.stmt) for each in ast.walk(node)) - 1 <= 60, node.name


def test_no_librarys_norm_no_pickle_and_no_clock_that_can_go_back():
    banned = r"layer_norm\(|nn\.LayerNorm|import pickle|torch\.load|(?<![\w.])(exec|eval)\(|time\.time\("
    for path in CODE:
        assert not re.search(banned, code(path)), path


def test_the_public_names_are_there_and_typed():
    """An editor reads the imports under TYPE_CHECKING; they are the names of __all__."""
    (typed,) = (node for node in ast.parse(code(ROOT / "gpt" / "__init__.py")).body if isinstance(node, ast.If))
    names = {alias.name for node in typed.body for alias in node.names}
    assert names == {*gpt.__all__} and all(getattr(gpt, name) is not None for name in names)
    with pytest.raises(AttributeError, match="nothing"):
        gpt.nothing  # noqa: B018


def test_importing_the_package_does_not_import_torch():
    lines = "import sys, gpt.config; assert 'torch' not in sys.modules; gpt.LayerNorm; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", lines], cwd=ROOT, check=True)


def test_sampling_does_not_wait_for_the_compiler(tmp_path):
    (tmp_path / "text.txt").write_text("norm " * 400, encoding="utf-8")
    train.train(
        configure(TOY | {"data": str(tmp_path / "text.txt"), "steps": 1, "warmup_steps": 0}), str(tmp_path / "r")
    )
    lines = "import sys, sample; sys.exit = print; sample.main(['r', '--max-new-tokens', '3']); "
    lines += "assert 'torch' in sys.modules and 'torch._dynamo' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, check=True, env=environment)


def test_the_readmes_file_map_is_the_tree():
    blocks = re.findall(r"```\n(.*?)```", README.split("## Files")[1], re.S)
    listed = [line.split()[0] for block in blocks for line in block.splitlines()]
    others = [ROOT / "data" / "prepare.py", ROOT / "benchmarks" / "speed.py", *(ROOT / "configs").glob("*")]
    files = {path.relative_to(ROOT).as_posix() for path in [*PACKAGE, *ROOT.glob("*.py"), *others]}
    files = {file for file in files if not file.endswith("__init__.py")} | {"data/gpt2/", "docs/", "tests/"}
    assert len(listed) == len({*listed}) and {*listed} == files


def test_the_readmes_table_of_placements_is_true():
    rows = {row[0].strip(" `"): row for row in (line.split("|")[1:-1] for line in README.splitlines()) if len(row) == 6}
    shape = {"vocab_size": 50257, "context_length": 1024, "n_layers": 12, "n_heads": 12, "d_model": 768}
    assert BLOCKS.keys() <= rows.keys()
    for norm in BLOCKS:
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
    both = "".join(code(ROOT / "gpt" / name) for name in ("norms.py", "blocks.py"))
    section = README.split("## The lesson")[1].split("\n\n")
    (table,) = (part for part in section if part.startswith("| part |"))
    lines = [row.split("|")[3].strip(" `") for row in table.splitlines()[2:]]
    assert len(lines) == 7 and all(line in both for line in lines)


def test_ci_installs_and_tests_as_the_readme_says():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for line in ("pip install -r requirements.txt", "python train.py --norm pre", "python -m pytest"):
        assert line in README and line in ci
    assert ".ci/run" in code(ROOT / ".github" / "workflows" / "ci.yml")


RUNNER = """
import json, runpy, sys
sys.path.insert(0, "")
import train, gpt.study.results
# Comparisons, of many runs, draw nothing; train.py and probe.py do.
train.draw = gpt.study.results._draw = lambda *arguments: None
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
        if program == "srun":
            program, arguments = "python", arguments[1 + arguments.index("python") :]
        assert program == "python", command
        if arguments[:2] == ["-m", "pytest"]:
            continue
        if arguments[0] in ("train.py", "compare.py"):
            arguments += ["--steps", "2", "--batch-size", "2", "--micro-batch-size", "1", "--eval-every", "2"]
            arguments += ["--eval-tokens", "99"]
            shape = [*toy[2:], "--depths", "1"] if "--depths" in arguments else toy
            arguments += [] if "--init" in arguments else [*shape, "--val-fraction", "0.1"]
            arguments += ["--seeds", "1", "--jobs", "1"] if arguments[0] == "compare.py" else []
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

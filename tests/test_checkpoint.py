"""A checkpoint comes back to the bit, or is refused by name; a run folder is made, found and never lost."""

import dataclasses
import json
import os
import re
import shutil
import signal
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from toys import KINDS, toy_config, toy_model, toy_tokens, write_config

import train
from gpt import BLOCKS, GPT, NORMS
from gpt.blocks import PreLN
from gpt.config import Failure, Mistake
from gpt.files import write
from gpt.loss import next_token_loss
from gpt.training import checkpoint, distributed
from gpt.training.distributed import ALONE
from gpt.training.optim import make_optimizer
from gpt.training.run import new_run, newest_run


def configured(placement="pre", **settings):
    """A run's configuration with the vocabulary of toy_model."""
    config = toy_config(norm=placement, **settings)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=61))


def trained(placement="pre", steps=2, **settings):
    """A toy model and its optimizer after some steps, with the configuration of the run."""
    config = configured(placement, **settings)
    model = toy_model(**dataclasses.asdict(config.model))
    optimizer = make_optimizer(model, config)
    for step in range(steps):
        tokens = toy_tokens(seed=step)
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, config


def save(run, model, optimizer, config, step=2, best_step=2, keep=2):
    state = {"step": step, "best_step": best_step, "config": checkpoint.config_to_json(config)}
    checkpoint.save(run, *distributed.gathered(model, optimizer, ALONE), state)
    checkpoint.tidy(run, state, keep)


def restore(folder, model, optimizer, config):
    """Load a checkpoint into a model and its optimizer, as training does; returns the state."""
    state, *tensors = checkpoint.read(folder, config)
    distributed.restore(model, optimizer, ALONE, *tensors)
    return state


def names(run):
    return sorted(path.name for path in run.iterdir())


WEIGHTS = [{"placement": placement} for placement in KINDS] + [{"norm_layer": name} for name in NORMS]
WEIGHTS += [{"start": "fan_in"}, {"norm_layer": "dyt", "start": "fan_in", "qk_norm": True}]


@pytest.mark.parametrize("settings", WEIGHTS, ids=str)
def test_a_model_comes_back_from_its_folder_alone(tmp_path, settings):
    model, optimizer, config = trained(**settings)
    new = toy_model(**dataclasses.asdict(config.model))
    moved = [name for name, x in new.named_parameters() if not torch.equal(x, model.get_parameter(name))]
    assert moved == [name for name, _ in model.named_parameters()]  # or else one that is not saved would be missed
    save(tmp_path, model, optimizer, config)
    tokens = toy_tokens()
    for folder in (tmp_path, tmp_path / "step-000002"):
        again = checkpoint.load_model(folder)
        assert again.config == model.config and torch.equal(again(tokens), model(tokens))
    assert names(tmp_path / "step-000002") == ["model.safetensors", "optimizer.safetensors", "state.json"]
    assert len({path.stat().st_mode for path in (tmp_path / "step-000002").iterdir()}) == 1


@pytest.mark.parametrize("settings", WEIGHTS, ids=str)
def test_the_optimizer_comes_back_to_the_bit(tmp_path, settings):
    model, optimizer, config = trained(**settings)
    save(tmp_path, model, optimizer, config)
    again, other, _ = trained(**settings, steps=1)
    restore(tmp_path / "step-000002", again, other, config)
    by_name = dict(again.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(by_name[name], parameter)
        before, after = optimizer.state[parameter], other.state[by_name[name]]
        assert before.keys() == after.keys() and before
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_run_stopped_before_its_first_step_comes_back_too(tmp_path):
    model, optimizer, config = trained(steps=0)
    save(tmp_path, model, optimizer, config, step=0, best_step=None)
    again, other, _ = trained(steps=1)
    assert restore(tmp_path / "step-000000", again, other, config)["step"] == 0
    assert not any(other.state.values()) and names(tmp_path) == ["last", "step-000000"]


@pytest.mark.parametrize("placement", KINDS)
def test_the_weights_of_another_placement_are_refused(tmp_path, placement):
    save(tmp_path, *trained(placement, steps=0))
    for other in KINDS:
        if other != placement:
            with pytest.raises(Mistake, match=rf"norm \({placement}, not {other}\)"):
                checkpoint.read(tmp_path / "step-000002", configured(other))


def test_another_architecture_is_refused_and_another_dropout_is_not(tmp_path):
    """Also where the weights have the same shapes: the start tells how the head is scaled."""
    save(tmp_path, *trained())
    for settings, change in (
        ({"n_layers": 3}, "n_layers (2, not 3)"),
        ({"start": "fan_in"}, "start (gpt2, not fan_in)"),
        ({"qk_norm": True}, "qk_norm (None, not True)"),
    ):
        with pytest.raises(Mistake, match=re.escape(change)):
            checkpoint.read(tmp_path / "step-000002", configured(**settings))
    checkpoint.read(tmp_path / "step-000002", configured(dropout=0.5))


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    save(tmp_path, *trained())
    with pytest.raises(Mistake, match=r"optimizer \(muon, not adamw\)"):
        checkpoint.read(tmp_path / "step-000002", configured(optimizer="adamw"))


def test_best_last_and_how_many_are_kept(tmp_path):
    model, optimizer, config = trained()
    for step, best in ((2, 2), (4, 4), (6, 4), (8, 4), (10, 4)):
        save(tmp_path, model, optimizer, config, step, best)
    assert names(tmp_path) == ["best", "last", "step-000004", "step-000008", "step-000010"]
    wanted = {None: 4, "best": 4, "last": 10, "8": 8, "4": 4}
    for which, step in wanted.items():
        assert checkpoint.find(tmp_path, which).name == f"step-{step:06d}"
    for which in ("6", "newest", "../last", "step-000008", ""):
        with pytest.raises(Mistake, match=r"--checkpoint 4, 8 or 10"):
            checkpoint.find(tmp_path, which)


def test_without_a_best_the_last_is_taken(tmp_path):
    save(tmp_path, *trained(), step=3, best_step=None)
    with pytest.raises(Mistake, match=r"\(best in .*\).*--checkpoint 3"):
        checkpoint.find(tmp_path, "best")
    assert checkpoint.find(tmp_path).name == "step-000003" and names(tmp_path) == ["last", "step-000003"]


def test_what_a_kill_left_behind_is_cleared_and_never_read(tmp_path):
    everything = trained()
    save(tmp_path, *everything)
    (tmp_path / ".step-000004").mkdir()
    (tmp_path / ".step-000004" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "step-000004").mkdir()  # renamed, and killed before `last` was moved
    (tmp_path / "step-000004" / "state.json").write_text("{}", encoding="utf-8")
    assert checkpoint.find(tmp_path, "last").name == "step-000002"
    checkpoint.try_folder(tmp_path)
    checkpoint.leave_branch(tmp_path, {"step": 2, "best_step": 2})
    save(tmp_path, *everything, step=4)
    assert names(tmp_path) == ["best", "last", "step-000002", "step-000004"]
    assert checkpoint.load_model(tmp_path / "step-000004").config == everything[2].model


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path):
    import resource

    everything = trained()
    save(tmp_path, *everything)
    before, limits = names(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    for largest in (0, 20_000):  # no file at all; a file cut short
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails, as on a full disk
        try:
            with pytest.raises(Failure, match=r"step 4 \(.*File too large"):
                save(tmp_path, *everything, step=4)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert names(tmp_path) == before
    checkpoint.load_model(tmp_path)


def test_folders_of_the_users_own_are_let_be_and_steps_are_numbers(tmp_path):
    everything = trained()
    (tmp_path / "step-000001-mine").mkdir()
    (tmp_path / "step-000001.tar").write_bytes(b"mine")
    for step in (999_000, 1_000_000, 1_001_000):
        save(tmp_path, *everything, step=step, best_step=None)
    assert names(tmp_path) == ["last", "step-000001-mine", "step-000001.tar", "step-1000000", "step-1001000"]


def test_a_loaded_checkpoint_is_not_held_open(tmp_path):
    """Windows would refuse to delete it. The tensors own their memory: changing the file changes nothing."""
    model, optimizer, config = trained()
    save(tmp_path, model, optimizer, config)
    again, other, _ = trained(steps=1)
    restore(tmp_path / "step-000002", again, other, config)
    loaded = checkpoint.load_model(tmp_path)
    for path in (tmp_path / "step-000002").glob("*.safetensors"):
        with open(path, "r+b") as file:
            file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(loaded(toy_tokens()), model(toy_tokens()))
    assert all(value.isfinite().all() for state in other.state.values() for value in state.values())


def test_a_damaged_file_is_named(tmp_path):
    save(tmp_path, *trained())
    with pytest.raises(Mistake, match=r"\(.*step-000002\).* last"):
        checkpoint.find(tmp_path / "step-000002", "last")
    path = tmp_path / "step-000002" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Mistake, match=r"damaged \(.*model\.safetensors"):
        checkpoint.load_model(tmp_path)
    for content in ("", "{", "{}", "[]", "3"):
        path.with_name("state.json").write_text(content, encoding="utf-8")
        with pytest.raises(Mistake, match=r"damaged \(.*state\.json"):
            checkpoint.load_model(tmp_path)


def test_where_there_is_nothing_to_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Mistake, match=r"\(.*nowhere\).* python train\.py"):
        checkpoint.load_model("nowhere")
    with pytest.raises(Mistake, match=r"\(.*runs\).* python train\.py"):
        newest_run()
    (tmp_path / "early").mkdir()
    write(tmp_path / "early" / "config.json", '{"format": 1}')
    with pytest.raises(Mistake, match=r"\(.*early\)"):
        checkpoint.find("early")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    save(tmp_path / "runs" / "mine", *trained(steps=0))
    for folder in ("nowhere", "runs", "early"):
        with pytest.raises(Mistake, match=rf"\(.*{folder}\).*: runs.mine"):
            checkpoint.find(folder)


def test_the_newest_run_is_the_one_that_saved_last(tmp_path):
    everything = trained(steps=0)
    for name, time in (("a", 3), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        save(tmp_path / name, *everything)
        os.utime(tmp_path / name / "last", (time, time))
    assert newest_run(tmp_path).name == "a"
    save(tmp_path / "c", *everything, step=3)
    assert newest_run(tmp_path).name == "c"


def test_settings_come_back_with_their_types():
    config = toy_config(final_norm=None, bias=False, micro_batch_size=2, lr=1, min_lr=0)
    stored = json.loads(json.dumps(checkpoint.config_to_json(config)))
    assert checkpoint.config_from_json(stored) == config
    del stored["dropout"]  # of a run from before there was such a setting
    assert checkpoint.config_from_json(stored) == config
    with pytest.raises(Mistake, match=r"\(999, not 1\)"):
        checkpoint.config_from_json(stored | {"format": 999})


def test_rates_are_stored_as_they_were():
    stored = checkpoint.config_to_json(toy_config(optimizer="adamw"))
    assert (stored["lr"], stored["min_lr"]) == (1e-3, 1e-4)


def test_a_fresh_run_takes_the_next_free_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Mistake, match=r"\(.*sub: Not a directory\)"):
        new_run("file/sub", "", False)
    made = [str(new_run(None, "text-pre", False)).replace("\\", "/") for _ in range(3)]
    assert made == ["runs/text-pre", "runs/text-pre-2", "runs/text-pre-3"]


def test_a_folder_with_something_in_it_is_never_overwritten_unasked(tmp_path):
    run, foreign = tmp_path / "run", tmp_path / "foreign"
    assert new_run(str(run), "", False) == run and new_run(str(run), "", False) == run
    write_config(run)
    write(run / "probe.jsonl", '{"step": 0}\n')
    assert new_run(str(run), "", False) == run and names(run) == [".lock"]  # it had ended before its first line
    for name in ("metrics.jsonl", "step-000001"):  # folders both, for once
        write_config(run)
        (run / name).mkdir()
        (run / name / "state.json").touch()
        with pytest.raises(Mistake, match=r"\(.*run\).*--resume.*--overwrite.*--out"):
            new_run(str(run), "", False)
        assert new_run(str(run), "", True) == run and names(run) == [".lock"]
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work", encoding="utf-8")
    (foreign / "config.json").write_text('{"model_type": "gpt2", "format": 1, "steps": 9}', encoding="utf-8")
    for overwrite in (False, True):
        for place in (foreign, foreign / "thesis.txt"):
            with pytest.raises(Mistake, match=rf"\(.*{place.name}\).*--out"):
                new_run(str(place), "", overwrite)
    assert names(foreign) == ["config.json", "thesis.txt"]


def test_a_run_that_is_deleted_leaves_what_training_did_not_write(tmp_path):
    save(tmp_path, *trained(), step=3)
    mine = ["notes.jsonl", "step-3 was the best.txt", "thesis.txt"]
    for name in [*mine, ".step-000001-old", "curve.png", "events.out.tfevents.1.2"]:
        (tmp_path / name).touch()
    write_config(tmp_path)
    new_run(str(tmp_path), "", True)
    assert names(tmp_path) == [".lock", *mine]


@pytest.mark.skipif(os.name == "nt", reason="links of POSIX")
def test_what_a_link_leads_to_is_never_deleted(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    for step in (1, 2, 3):
        save(run, *trained(), step=step, best_step=None, keep=9)
    (run / "step-000001").rename(elsewhere)
    (run / "step-000001").symlink_to(elsewhere)
    checkpoint.tidy(run, {"step": 3, "best_step": None}, keep=1)
    assert names(run) == ["last", "step-000003"] and len(names(elsewhere)) == 3
    (run / "step-000001").symlink_to(elsewhere)
    (elsewhere / "thesis.txt").touch()
    write_config(run)
    (tmp_path / "link").symlink_to(run)
    assert new_run(str(tmp_path / "link"), "", True) == tmp_path / "link"
    assert names(run) == [".lock"] and len(names(elsewhere)) == 4


def test_a_file_beside_a_checkpoints_own_is_kept(tmp_path):
    for step in (1, 2):
        save(tmp_path, *trained(), step=step, best_step=None, keep=9)
    (tmp_path / "step-000001" / "thesis.txt").touch()
    write_config(tmp_path)
    with pytest.raises(Mistake, match=r"thesis\.txt.*--out"):
        new_run(str(tmp_path), "", True)
    assert names(tmp_path / "step-000002")
    checkpoint.tidy(tmp_path, {"step": 2, "best_step": None}, keep=1)
    assert names(tmp_path / "step-000001") == ["thesis.txt"]
    assert checkpoint.find(tmp_path, "last").name == "step-000002"
    new_run(str(tmp_path), "", True)
    assert names(tmp_path) == [".lock", "step-000001"]


def test_checkpoints_count_without_the_file_that_names_the_last(tmp_path):
    """A kill came between the two."""
    save(tmp_path, *trained(), step=2)
    save(tmp_path, *trained(), step=3, best_step=2)
    (tmp_path / "last").unlink()
    write_config(tmp_path)
    assert checkpoint.find(tmp_path, "last").name == "step-000003"
    with pytest.raises(Mistake, match="--overwrite"):
        new_run(str(tmp_path), "", False)


DAMAGED = [{"best_step": "x"}, {"best_step": -1}, {"best_val_loss": "x"}, {"val_loss": []}, {"record": "x"}]


@pytest.mark.parametrize("part", DAMAGED, ids=str)
def test_a_state_of_other_types_is_named(tmp_path, part):
    save(tmp_path, *trained())
    path = tmp_path / "step-000002" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | part), encoding="utf-8")
    with pytest.raises(Mistake, match=r"state\.json"):
        checkpoint.read_state(path.parent)


def test_runs_that_start_at_once_get_folders_of_their_own(tmp_path, monkeypatch):
    """Also where another process is faster between the look and the making."""
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: new_run(None, "text-pre", False), range(40)))
    assert len({*runs}) == 40


def test_going_on_from_an_earlier_checkpoint_leaves_the_later_branch(tmp_path):
    """A checkpoint of the branch that is left counts neither as the newest nor as the best."""
    for step in (7, 8, 9):
        save(tmp_path, *trained(), step=step, best_step=8 if step > 7 else None, keep=9)
    checkpoint.leave_branch(tmp_path, {"step": 7, "best_step": None})
    assert names(tmp_path) == ["last", "step-000007"] and checkpoint.find(tmp_path).name == "step-000007"
    save(tmp_path, *trained(), step=8, best_step=8, keep=2)
    checkpoint.leave_branch(tmp_path, {"step": 8, "best_step": 8})  # nothing is later
    assert names(tmp_path) == ["best", "last", "step-000007", "step-000008"]


class SharedNorm(PreLN):
    """Its two norms are one module."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.mlp_norm = self.attn_norm


class Transposed(PreLN):
    """A weight of it is a transposed view, and another shares its memory."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.mlp.up.weight = torch.nn.Parameter(self.mlp.up.weight.data.t().contiguous().t())
        self.mlp.down.weight = torch.nn.Parameter(self.mlp.up.weight.data.t())


class Constant(PreLN):
    """It has a tensor that is no weight."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.half = torch.linspace(0, 1, 3)[1]
        self.third = torch.linspace(0, 1, 4)[1].item()

    def forward(self, x):
        return self.third * super().forward(x) + self.half * x


@pytest.mark.parametrize("block", [SharedNorm, Transposed, Constant])
def test_weights_that_share_memory_are_saved_and_trained_further(tmp_path, text_file, monkeypatch, quick, block):
    monkeypatch.setitem(BLOCKS, "mine", block)
    config = toy_config(norm="mine", data=str(text_file), steps=4, save_every=2)
    train.train(config, str(tmp_path / "r"))
    train.train(config, str(tmp_path / "r"), resume="2")
    loaded, again = (checkpoint.load_model(tmp_path / "r" / f"step-00000{step}") for step in (2, 4))
    assert set(loaded.state_dict()) == set(GPT(again.config).state_dict())
    assert again(toy_tokens()).isfinite().all()
    assert not torch.equal(loaded.blocks[0].attn_norm.weight, again.blocks[0].attn_norm.weight)


def test_a_checkpoint_is_hashed_and_read_in_pieces(tmp_path):
    """Of a file of 64 MB no more than a part is in memory beside the tensors."""
    weights = {"a": torch.zeros(2**24)}
    tracemalloc.start()
    checkpoint.save(tmp_path, weights, {}, {"step": 1})
    checkpoint._tensors(tmp_path / "step-000001", "model.safetensors", {})
    peak = tracemalloc.get_traced_memory()[1]  # Python's own, without torch's
    tracemalloc.stop()
    assert peak < 2**23


def test_a_remedy_names_what_there_is(tmp_path):
    save(tmp_path, *trained(), step=3)
    (tmp_path / "last").write_text("99", encoding="utf-8")
    with pytest.raises(Mistake, match=r"\(last, step 99, in .*\).*--checkpoint 3"):
        checkpoint.find(tmp_path, "last")
    (tmp_path / "step-000003" / "model.safetensors").write_bytes(b"")
    with pytest.raises(Mistake, match=r"damaged \((?!.*--checkpoint)"):
        checkpoint.load_model(tmp_path / "step-000003")


def test_a_checkpoint_that_a_run_deletes_meanwhile_is_looked_up_again(tmp_path, monkeypatch):
    for step in (3, 4):
        save(tmp_path, *trained(), step=step)

    def read_late(folder, really=checkpoint.read_state):
        if folder.name == "step-000003":
            write(tmp_path / "best", "4")
            shutil.rmtree(folder)
        return really(folder)

    monkeypatch.setattr(checkpoint, "read_state", read_late)
    write(tmp_path / "best", "3")
    assert checkpoint.load_run(tmp_path)[0].name == "step-000004"
    for folder, which in ((tmp_path, "3"), (tmp_path / "step-000003", None)):
        save(tmp_path, *trained(), step=3)
        with pytest.raises(Mistake, match="step-000003|3 in .*--checkpoint 4"):
            checkpoint.load_run(folder, which)
    (tmp_path / "step-000004" / "model.safetensors").write_bytes(b"")
    with pytest.raises(Mistake, match="damaged.*model.safetensors"):
        checkpoint.load_run(tmp_path)


def test_a_placement_that_is_gone_is_no_damage(tmp_path, monkeypatch):
    monkeypatch.setitem(BLOCKS, "mine", BLOCKS["pre"])
    save(tmp_path, *trained("mine"), step=3)
    monkeypatch.delitem(BLOCKS, "mine")
    with pytest.raises(Mistake, match=r"step-000003.*\(mine\)") as raised:
        checkpoint.load_model(tmp_path / "step-000003")
    assert "damaged" not in str(raised.value)

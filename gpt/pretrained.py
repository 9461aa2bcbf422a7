"""Published weights <-> ours: GPT-2, whose block is `pre`, and GPT-1, whose block is `post`, in Hugging Face's files.

python -m gpt.pretrained check gpt2            the published facts about these weights: expected and measured
python -m gpt.pretrained export RUN FOLDER     a run -> a folder that transformers opens
"""

import dataclasses
import difflib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gpt.config import Failure, Mistake, ModelConfig, require_same, settings_of, typed, unknown
from gpt.model import GPT
from gpt.published import ACTIVATIONS, FIXED, NAMES, PLACEMENTS, SETTINGS, table

INDEX = "model.safetensors.index.json"


def recognizes(source: str | Path) -> bool:
    """True for a published name (or a near miss) and for a folder whose config.json has "model_type"."""
    if not Path(source).exists():
        return bool(difflib.get_close_matches(str(source), NAMES, cutoff=0.7))
    try:
        return "model_type" in json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def find(source: str | Path, files=("config.json", "model.safetensors")) -> Path:
    """The folder that `source` is, or the one in which huggingface-hub keeps a published name's `files`, downloaded on
    first use. Raises Mistake if there is neither or the download fails."""
    name = str(source)
    if Path(source).is_dir():
        return Path(source)
    if name not in NAMES:
        raise Mistake(f"{unknown('weights', name, NAMES)} There is no folder of that name either.")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        for file in files:
            try:  # first without asking whether there is a newer one
                path = hf_hub_download(NAMES[name], file, local_files_only=True)
            except LocalEntryNotFoundError:
                path = hf_hub_download(NAMES[name], file)
    except ImportError:
        raise Mistake(f"{name} comes by huggingface-hub (not installed). pip install huggingface-hub") from None
    except Exception as error:  # the hub's library, and the one below it, raise errors of many kinds
        reason = str(error).strip().partition("\n")[0]
        raise Mistake(
            f"cannot download {name} ({NAMES[name]}: {reason}). Connect to the network, set HF_ENDPOINT to a mirror, "
            "or name a folder that has its config.json and model.safetensors."
        ) from None
    return Path(path).parent


def read_config(folder: Path) -> ModelConfig:
    """The architecture in a folder's config.json. Raises Mistake if it is not GPT-2's or GPT-1's, or not as ours."""
    path, fields = folder / "config.json", settings_of(ModelConfig)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        kind = stored["model_type"]
        if kind not in PLACEMENTS:
            raise ValueError(f"model_type is {kind}; known are {', '.join(PLACEMENTS)}")
        for name, only in FIXED.items():
            usual = 4 * stored["n_embd"] if name == "n_inner" else only
            if stored.get(name, only) not in (only, usual):
                raise ValueError(f"{name} is {stored[name]}, and can only be {usual}")
        activation = stored["afn" if kind == "openai-gpt" else "activation_function"]
        if activation not in ACTIVATIONS[kind]:
            raise ValueError(f"the activation is {activation}; known are {', '.join(ACTIVATIONS[kind])}")
        settings = {name: typed(name, stored[outer], fields[name]) for name, outer in SETTINGS.items()}
        settings |= {"norm": PLACEMENTS[kind], "activation": ACTIVATIONS[kind][activation]}
        return ModelConfig(vocab_size=stored["vocab_size"], **settings)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        lacking = "it lacks " if isinstance(error, KeyError) else ""
        reason = lacking + (getattr(error, "strerror", None) or str(error).rstrip("."))
        raise Mistake(f"not a GPT-2 or GPT-1 configuration ({path}: {reason}). Name another folder.") from None


def _files(folder: Path) -> list[Path]:
    """The safetensors of a folder: one file, or the shards of an index."""
    single, index, pickled = (folder / name for name in ("model.safetensors", INDEX, "pytorch_model.bin"))
    if single.exists() or not (index.exists() or pickled.exists()):
        return [single]
    if not index.exists():
        remedy = "if you trust it, load it with transformers, whose save_pretrained() writes model.safetensors"
        raise ValueError(f"{pickled.name} is a pickle, which may run any code; {remedy}")
    files = sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    if any(path.parent != folder or path.name == ".." for path in files):
        raise ValueError(f"{INDEX} leads out of the folder")
    return files


def _tensors(folder: Path, config: ModelConfig, longest: int) -> dict[str, torch.Tensor]:
    """The stored tensors in float32, by our names, or by their own where we have none."""
    stored = []
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            stored += [(name, path) for name in file.keys()]
    if config.n_layers > len(stored):  # before anything is made as large as an untrusted file says
        raise ValueError(f"{len(stored)} tensors, {config.n_layers} blocks")
    places = table("gpt2" if config.norm == "pre" else "openai-gpt", config.n_layers)
    weights: dict[str, torch.Tensor] = {}
    for name, path in stored:
        outer = name.removeprefix("transformer.")
        if outer == "position_ids" or re.fullmatch(r"h\.\d+\.attn\.(bias|masked_bias)", outer):
            continue
        inner, turned = places.get(outer, (name, False))
        if inner in weights:
            raise ValueError(f"there are two tensors for {inner}")
        with safe_open(path, framework="pt") as file:  # anew for each: the pages of all would stay in memory
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has numbers of type {tensor.dtype}")
        if turned:
            tensor = tensor.t()
        elif inner == "position_embedding.weight" and tensor.shape[:1] == (longest,):
            tensor = tensor[: config.context_length]
        weights[inner] = torch.empty(tensor.shape).copy_(tensor)  # so that nothing is written to the file's own pages
    head = weights.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, weights["token_embedding.weight"]):
        raise ValueError("lm_head.weight is not the token embedding")
    return weights


def load(source: str | Path, config: ModelConfig | None = None) -> GPT:
    """A published name, or a folder as Hugging Face lays it out (config.json; model.safetensors or its shards) -> the
    model, in float32 on the CPU, in evaluation mode. A `config` may differ from the stored one in its dropout and in a
    shorter context_length, which crops the table of positions.

    Every stored tensor has one place in the model. Causal masks and positions, which some files have, are not read,
    and a stored head has to be the token embedding. Raises Mistake, with the names, if a tensor is missing, unknown,
    there twice, or of another shape.
    """
    folder = find(source)
    stored = read_config(folder)
    config, longest = config or stored, stored.context_length
    shortened = dataclasses.replace(stored, context_length=min(longest, config.context_length))
    require_same(shortened, config, str(folder))

    def refused(error: Exception) -> Mistake:
        reason = " ".join(str(error).removeprefix("Error(s) in loading state_dict for GPT:").split())[:400]
        return Mistake(f"cannot use the weights ({folder}: {reason}). Get files that fit their config.json.")

    try:
        weights = _tensors(folder, config, longest)
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise refused(error) from None
    with torch.device("meta"):  # shapes alone: the weights come from the files
        model = GPT(config)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise refused(error) from None
    return model.eval()


def export(model: GPT, folder: str | Path, tokenizer=None):
    """Write a pre-LN model, and its tokenizer if given, into a folder that transformers' AutoModelForCausalLM and
    AutoTokenizer open. Raises Mistake for a model that GPT-2's code does not compute, and for a folder in use; Failure
    if the disk does not take it."""
    config = model.config
    needed = {"norm": ("pre",), "norm_layer": ("layernorm",), "final_norm": (None, True)}
    if unlike := [f"{name} {getattr(config, name)}" for name in needed if getattr(config, name) not in needed[name]]:
        raise Mistake(f"GPT-2 has no such block ({', '.join(unlike)}). Only pre with layernorm can be exported.")
    end_of_text = None if tokenizer is None else tokenizer.end_of_text
    activations = {name: outer for outer, name in ACTIVATIONS["gpt2"].items()}
    settings = {outer: getattr(config, name) for name, outer in SETTINGS.items()}
    settings |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32"}
    settings |= {"vocab_size": config.vocab_size, "activation_function": activations[config.activation]}
    settings |= {"resid_pdrop": config.dropout, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    settings |= {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    weights, tensors = model.state_dict(), {}
    for outer, (inner, turned) in table("gpt2", config.n_layers).items():
        # A model without biases is one whose biases are 0.
        tensor = weights[inner] if inner in weights else torch.zeros(len(weights[inner.replace("bias", "weight")]))
        tensors[f"transformer.{outer}"] = (tensor.t() if turned else tensor).contiguous()
    files: dict[str, dict] = {"config.json": settings}
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer.to_json()
        special = {} if tokenizer.end_of_text is None else {"bos_token": tokenizer.start, "eos_token": tokenizer.start}
        files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    _write(Path(folder).resolve(), files, tensors)


def _write(folder: Path, files: dict[str, dict], tensors: dict[str, torch.Tensor]):
    """Make a folder of JSON files and model.safetensors, whole or not at all."""
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise FileExistsError("there is something already")
        new.mkdir(parents=True)
    except OSError as error:
        raise Mistake(f"cannot export to {folder} ({error.strerror or error}). Name a new folder.") from None
    try:
        for name, content in files.items():
            (new / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        shutil.copymode(new / "config.json", new / "model.safetensors")
        for path in new.iterdir():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        if folder.exists():
            folder.rmdir()
        new.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new)
        raise Failure(f"cannot export to {folder} ({error}). Make room.") from None


def main(argv: list[str]):
    from gpt import published
    from gpt.command_line import CommandLine
    from gpt.tokenizer import TOKENIZERS
    from gpt.training import checkpoint, corpus

    command = CommandLine(prog="python -m gpt.pretrained", description=__doc__)
    command.add_argument("verb", choices=("check", "export"), metavar="check|export")
    command.add_argument("source", metavar="WEIGHTS|RUN", help="a name or folder to check; a run to export")
    command.add_argument("folder", nargs="?", metavar="FOLDER", help="where to export to")
    words = command.parse_args(argv)

    def body():
        if words.verb == "export" and words.folder:
            config = checkpoint.read_state(checkpoint.find(words.source))[1]
            export(checkpoint.load_model(words.source), words.folder, TOKENIZERS[config.tokenizer]())
            print(f"exported {words.source} to {words.folder}")
        elif words.verb == "check" and not words.folder:
            folder, agree = find(words.source), []
            for fact in published.check(load(folder), folder, corpus.shakespeare):
                print(fact.line(), flush=True)
                agree.append(fact.agrees)
            return int(False in agree)
        else:
            raise Mistake(f"check takes one source, export a run and a folder ({words.verb}). See --help.")

    command.run(body)


if __name__ == "__main__":
    main(sys.argv[1:])

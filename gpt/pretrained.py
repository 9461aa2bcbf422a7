"""Published weights <-> ours: GPT-2, whose block is `pre`, and GPT-1, whose block is `post`, in Hugging Face's files.

python -m gpt.pretrained check gpt2            the published facts about these weights: expected and measured
python -m gpt.pretrained export RUN FOLDER     a run -> a folder that transformers opens
"""
# ruff: noqa: E402

import contextlib
import json
import logging
import os
import re
import sys
from argparse import RawDescriptionHelpFormatter as Lines
from pathlib import Path

from gpt.config import Failure, Mistake, ModelConfig, one_of, require_same


def main(argv: list[str]):
    """The command; it stands before the imports below, so that --help does not wait for torch or need it."""
    from gpt.command_line import CommandLine

    command = CommandLine(prog="python -m gpt.pretrained", description=__doc__, formatter_class=Lines)
    command.add_argument("verb", choices=("check", "export"), metavar="check|export")
    command.add_argument("source", metavar="WEIGHTS|RUN", help="a name or folder to check; a run to export")
    command.add_argument("folder", nargs="?", metavar="FOLDER", help="where to export to")
    words = command.parse_args(argv)

    def body():
        from gpt import pretrained, published
        from gpt.screen import tell
        from gpt.tokenizer import TOKENIZERS
        from gpt.training import checkpoint, corpus

        if words.verb == "export" and words.folder:
            config = checkpoint.read_state(source := checkpoint.find(words.source))[1]
            pretrained.target(config.model, words.folder)  # before anything is loaded
            pretrained.export(checkpoint.load_model(source), words.folder, TOKENIZERS[config.tokenizer]())
            tell(f"exported {words.source} to {words.folder}")
        elif words.verb == "check" and not words.folder:
            folder, agree = pretrained.find(words.source), []
            for fact in published.check(pretrained.load(folder), folder, corpus.shakespeare):
                print(fact.line(), flush=True)
                agree.append(fact.agrees)
            return int(False in agree)
        else:
            raise Mistake(f"check takes one source, export a run and a folder ({words.verb}). See --help.")

    command.run(body)


if __name__ == "__main__":
    main(sys.argv[1:])


import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gpt.files import new_folder, read_json
from gpt.model import GPT, with_weights
from gpt.published import ACTIVATIONS, NAMES, SETTINGS, nearest, read_config, table

OURS = ("last", "state.json")  # in the folder of a run, of a checkpoint
INDEX = "model.safetensors.index.json"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def recognizes(source: str | Path) -> bool:
    """True for weights that are not a run's: a folder of them; where there is none, a published name or a near miss."""
    name, folder = str(source), Path(source)
    if not os.path.exists(source):  # not Path.exists, which raises an error for a long text
        return bool(nearest(name))
    if any(os.path.exists(folder / ours) for ours in OURS):
        return False
    try:
        return not {"model_type", "n_embd"}.isdisjoint(read_json(folder / "config.json"))
    except Mistake:
        return any(folder.glob("*model*.safetensors"))


def find(source: str | Path, files=("config.json", "model.safetensors")) -> Path:
    """The folder that `source` is, or the one in which huggingface-hub keeps a published name's `files`, downloaded on
    first use. Raises Mistake if there is neither or the download fails."""
    name = str(source)
    if os.path.isdir(source):
        if any(os.path.exists(Path(source, ours)) for ours in OURS):
            raise Mistake(f"that is a run ({name}). Export it first: python -m gpt.pretrained export {name} FOLDER")
        return Path(source)
    repository = NAMES.get(name, name)
    if repository not in NAMES.values():
        if os.path.exists(source):
            raise Mistake(f"that is a file ({name}). Name the folder of the weights.")
        remedy = f"Did you mean {one_of(near)}?" if (near := nearest(name)) else f"Known: {', '.join(NAMES)}."
        raise Mistake(f"no weights of that name and no such folder ({name}). {remedy}")
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import LocalEntryNotFoundError

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each new try
        for file in files:  # first without asking whether there is a newer one
            try:
                path = hf_hub_download(repository, file, local_files_only=True)
            except LocalEntryNotFoundError:
                try:
                    get_hf_file_metadata(hf_hub_url(repository, file))
                except Exception as error:
                    if type(error).__name__.startswith("Connect"):  # a download would try again for half a minute
                        raise
                path = hf_hub_download(repository, file)
    except ImportError:
        raise Mistake(f"{name} comes by huggingface-hub (not installed). pip install huggingface-hub") from None
    except Exception as error:  # the hub's library, and the one below it, raise errors of many kinds
        reason = str(error).strip().partition("\n")[0]
        raise Mistake(
            f"cannot download {name} ({repository}: {reason}). Connect to the network, set HF_ENDPOINT to a mirror, "
            "or name a folder that has its config.json and model.safetensors."
        ) from None
    return Path(path).parent


def _unusable(folder: Path, reason, remedy="Get files that fit their config.json.") -> Mistake:
    return Mistake(f"cannot use the weights ({folder}: {reason}). {remedy}")


def _files(folder: Path) -> list[Path]:
    """The safetensors of a folder: one file, or the shards of an index."""
    files = [folder / "model.safetensors"]
    if not files[0].exists() and (folder / INDEX).exists():
        places = read_json(folder / INDEX).get("weight_map")
        files = sorted({folder / str(name) for name in places.values()}) if isinstance(places, dict) else [folder]
        if any(path.parent != folder or path.name == ".." for path in files):
            raise _unusable(folder, f"{INDEX} leads out of the folder")
    for file in files:
        if not file.is_file():
            if pickles := sorted(folder.glob("pytorch_model*.bin")):
                remedy = "If you trust it, load it with transformers, whose save_pretrained() writes model.safetensors."
                raise _unusable(folder, f"{pickles[0].name} is a pickle, which may run any code", remedy)
            raise _unusable(folder, f"there is no file {file.name}", "Name a folder that has it, or put it there.")
    return files


@contextlib.contextmanager
def _opened(path: Path):
    try:
        with open(path, "rb"), safe_open(path, framework="pt") as file:  # the first has the system's reason
            yield file
    except (OSError, SafetensorError, AttributeError) as error:  # AttributeError: a type that this torch does not have
        raise _unusable(path, error, "Make it readable, download it again, or name another.") from None


def _tensors(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The stored tensors in float32, by our names, or by their own where we have none."""
    stored = []
    for path in _files(folder):
        with _opened(path) as file:
            stored += [(name, path) for name in file.keys()]
    # An untrusted file may say that there are many more blocks than tensors.
    places = table("gpt2" if config.norm == "pre" else "openai-gpt", min(config.n_layers, len(stored)))
    weights: dict[str, torch.Tensor] = {}
    for name, path in stored:
        outer = name.removeprefix("transformer.")
        if outer == "position_ids" or re.fullmatch(r"h\.\d+\.attn\.(bias|masked_bias)", outer):
            continue
        inner, turned = places.get(outer, (name, False))
        if inner in weights:
            raise _unusable(folder, f"there are two tensors for {inner}")
        with _opened(path) as file:  # anew for each: the pages of all would stay in memory
            tensor = file.get_tensor(name)
        if tensor.dtype not in FLOATS:
            raise _unusable(folder, f"{name} has numbers of type {tensor.dtype}", "Name weights in float32 or float16.")
        tensor = tensor.t() if turned and tensor.dim() == 2 else tensor
        weights[inner] = torch.empty(tensor.shape).copy_(tensor)  # so that nothing is written to the file's own pages
        if not weights[inner].isfinite().all():
            raise _unusable(folder, f"{name} has numbers that are not finite", "Get sound weights.")
    head, embedding = weights.pop("lm_head.weight", None), weights.get("token_embedding.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise _unusable(folder, "lm_head.weight is not the token embedding", "Name weights that share the two.")
    ours = {inner for inner, _ in places.values()}
    heads = sorted(name for name in weights.keys() - ours if not re.match(r"(transformer\.)?h\.", name))
    if heads and ours <= weights.keys():
        remedy = "Open it with transformers' AutoModelForCausalLM, whose save_pretrained() leaves that out."
        raise _unusable(folder, f"{heads[0]} is of a head for another task", remedy)
    return weights


def load(source: str | Path, config: ModelConfig | None = None) -> GPT:
    """A published name, or a folder as Hugging Face lays it out (config.json; model.safetensors or its shards) -> the
    model, in float32 on the CPU, in evaluation mode. A `config` may differ from the stored one in its dropout and in a
    shorter context_length, which crops the table of positions.

    Causal masks and positions, which some files have, are not read, and a stored head has to be the token embedding.
    Raises Mistake, with the names, if a tensor is missing, unknown, there twice, of another shape, or not finite.
    """
    folder = find(source)
    stored = read_config(folder)
    require_same(stored, config or stored, str(folder), shorter=True)
    weights = _tensors(folder, stored)
    try:
        return with_weights(stored, weights, config, "meta")
    except Mistake as error:
        raise _unusable(folder, error) from None


def export(model: GPT, folder: str | Path, tokenizer=None):
    """Write a pre-LN model, and its tokenizer if given, into a folder that transformers' AutoModelForCausalLM and
    AutoTokenizer open. Raises Mistake as `target` does; Failure if the disk does not take it."""
    config, path = model.config, target(model.config, folder)
    end_of_text = None if tokenizer is None else tokenizer.end_of_text
    names = {name: outer for outer, name in ACTIVATIONS["gpt2"].items()}
    settings = {outer: getattr(config, name) for name, outer in SETTINGS.items()}
    settings |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "dtype": "float32", "embd_pdrop": 0.0}
    settings |= {"vocab_size": config.vocab_size, "activation_function": names[config.activation], "attn_pdrop": 0.0}
    settings |= {"resid_pdrop": config.dropout, "bos_token_id": end_of_text, "eos_token_id": end_of_text}
    weights, tensors = model.state_dict(), {}
    for outer, (inner, turned) in table("gpt2", config.n_layers).items():
        # A model without biases is one whose biases are 0.
        tensor = weights[inner] if inner in weights else torch.zeros(len(weights[inner.replace("bias", "weight")]))
        if inner.startswith("final_norm."):  # GPT-2's code has no scale of the head
            tensor = tensor * model.head_scale
        tensors[f"transformer.{outer}"] = (tensor.t() if turned else tensor).contiguous()
    files: dict[str, dict] = {"config.json": settings}
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer.to_json()
        special = {} if tokenizer.end_of_text is None else {"bos_token": tokenizer.start, "eos_token": tokenizer.start}
        files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    try:
        with new_folder(path) as new:
            for name, content in files.items():
                (new / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
            save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise Failure(f"cannot export to {path} ({error}). Make room, or name another folder.") from None


def target(config: ModelConfig, folder: str | Path) -> Path:
    """The folder that a model is exported to. Raises Mistake for an architecture that GPT-2's code does not compute,
    and for a folder in use."""
    needed = {"norm": ("pre",), "norm_layer": ("layernorm",), "final_norm": (None, True), "qk_norm": (None, False)}
    if unlike := [f"{name} {getattr(config, name)}" for name in needed if getattr(config, name) not in needed[name]]:
        raise Mistake(f"GPT-2 has no such block ({', '.join(unlike)}). Only pre with layernorm can be exported.")
    path = Path(folder).resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and any(path.iterdir()):
            raise FileExistsError("there is something already")
    except OSError as error:
        raise Mistake(f"cannot export to {path} ({error.strerror or error}). Name a new folder.") from None
    return path

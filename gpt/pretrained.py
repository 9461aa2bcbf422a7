"""Published weights <-> ours: GPT-2, whose block is `pre`, and GPT-1, whose block is `post`, in Hugging Face's files.

python -m gpt.pretrained check gpt2            what is published about these weights: expected and found
python -m gpt.pretrained export RUN FOLDER     a run -> a folder that transformers opens
"""

import contextlib
import dataclasses
import difflib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from gpt import hub, published
from gpt.config import Mistake, ModelConfig, require_same
from gpt.model import GPT, shape_only
from gpt.training.files import flush, read_json

# Published module -> ours, and whether its weight is stored [in, out] and has to be transposed, which the shape of a
# square matrix does not tell.
OUTSIDE = {
    "gpt2": {"wte": ("token_embedding", False), "wpe": ("position_embedding", False), "ln_f": ("final_norm", False)},
    "openai-gpt": {"tokens_embed": ("token_embedding", False), "positions_embed": ("position_embedding", False)},
}
BLOCK = {
    "ln_1": ("attn_norm", False),
    "attn.c_attn": ("attn.qkv", True),
    "attn.c_proj": ("attn.out", True),
    "ln_2": ("mlp_norm", False),
    "mlp.c_fc": ("mlp.up", True),
    "mlp.c_proj": ("mlp.down", True),
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def table(kind: str, n_layers: int) -> dict[str, tuple[str, bool]]:
    """Published parameter -> ours and whether it is transposed, for a "gpt2" or "openai-gpt" of `n_layers` blocks."""
    modules = dict(OUTSIDE[kind])
    for i in range(n_layers):
        modules |= {f"h.{i}.{theirs}": (f"blocks.{i}.{ours}", turned) for theirs, (ours, turned) in BLOCK.items()}
    parameters = {}
    for theirs, (ours, turned) in modules.items():
        parameters[f"{theirs}.weight"] = (f"{ours}.weight", turned)
        if "embedding" not in ours:
            parameters[f"{theirs}.bias"] = (f"{ours}.bias", False)
    return parameters


def recognizes(source: str | Path) -> bool:
    """Whether `source` is a name of published weights, if perhaps misspelt, and no folder; or a folder with a
    configuration like theirs, unlike that of a run."""
    path = Path(source) / "config.json"
    if path.exists():
        with contextlib.suppress(ValueError):  # a run does not need its config.json
            return "model_type" in read_json(path)
        return False
    return not Path(source).exists() and bool(difflib.get_close_matches(str(source), hub.NAMES, cutoff=0.7))


def load(source: str | Path, config: ModelConfig | None = None) -> GPT:
    """A published name, or a folder as Hugging Face lays it out (config.json; model.safetensors or its shards) -> the
    model, in float32 on the CPU. A `config` may differ from the stored one in its dropout and in a shorter
    context_length, which crops the table of positions.

    Every stored tensor has one place in the model, but for what some files have besides: the tied head once more, which
    is compared, and causal masks and positions, which are not read.
    Raises Mistake, with the names, if one is missing, unknown, there twice, or of another shape.
    """
    folder = hub.find(source)
    published_config, stored = hub.read_config(folder), hub.tensors(folder)
    config, longest = config or published_config, published_config.context_length
    shortened = dataclasses.replace(published_config, context_length=min(longest, config.context_length))
    require_same(shortened, config, f"{folder} has")
    if config.n_layers > len(stored):
        raise Mistake(f"the weights are not all there ({folder}: {len(stored)} tensors). Get them again.")
    model = shape_only(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    places = table("gpt2" if config.norm == "pre" else "openai-gpt", config.n_layers)
    weights, wrong = {}, []
    # The embeddings first, since they are the largest, and then the head, to be compared with them.
    for name in sorted(stored, key=lambda name: (".h." in f".{name}", name.endswith("lm_head.weight"))):
        theirs = name.removeprefix("transformer.")
        mask = re.fullmatch(r"h\.(\d{1,9})\.attn\.(bias|masked_bias)", theirs)
        if theirs == "position_ids" or (mask and int(mask[1]) < config.n_layers):
            continue
        tied = theirs == "lm_head.weight"
        ours, turned = ("token_embedding.weight", False) if tied else places.get(theirs, (None, False))
        if ours is None:
            wrong.append(name)
            continue
        tensor = hub.read(stored[name], name)
        found = f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        if turned:
            tensor = tensor.t() if tensor.dim() == 2 else tensor
        elif ours == "position_embedding.weight" and tensor.shape[:1] == (longest,):
            tensor = tensor[: config.context_length]
        if tensor.shape != shapes[ours] or tensor.dtype not in FLOATS:
            wrong.append(found)
        elif ours not in weights:
            # A copy: float32, contiguous, and not the file's own pages.
            weights[ours] = torch.empty(tensor.shape).copy_(tensor)
        elif not tied or not torch.equal(tensor.float(), weights[ours]):
            wrong.append(f"another {name}")
    missing = [name for name, (ours, _) in places.items() if ours not in weights]
    if wrong or missing:
        found = (
            f"{what} {', '.join(which[:4])}" for what, which in (("no place for", wrong), ("no", missing)) if which
        )
        raise Mistake(f"the weights are not those of config.json ({folder}: {'; '.join(found)}). Get them again.")
    model.load_state_dict(weights, assign=True)
    return model


def export(model: GPT, folder: str | Path, tokenizer=None):
    """Write a pre-LN model, and its tokenizer if given, into a folder that transformers' AutoModelForCausalLM and
    AutoTokenizer open. Raises Mistake for a model that GPT-2's code does not compute, and for a folder in use."""
    config = model.config
    unlike = [f"norm {config.norm}"] * (config.norm != "pre")
    unlike += [f"norm_layer {config.norm_layer}"] * (config.norm_layer != "layernorm")
    unlike += ["no final norm"] * (config.final_norm is False)
    if unlike:
        raise Mistake(f"GPT-2 has no such block ({', '.join(unlike)}). Only pre with layernorm can be exported.")
    end_of_text = None if tokenizer is None else tokenizer.end_of_text
    settings = {theirs: getattr(config, ours) for ours, theirs in hub.SETTINGS.items()} | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "activation_function": {ours: theirs for theirs, ours in hub.ACTIVATIONS["gpt2"].items()}[config.activation],
        "resid_pdrop": config.dropout,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": "float32",
    }
    weights, tensors = model.state_dict(), {}
    for theirs, (ours, turned) in table("gpt2", config.n_layers).items():
        if ours in weights:
            tensor = weights[ours].t() if turned else weights[ours]
        else:  # a model without biases is one whose biases are 0
            tensor = torch.zeros(weights[ours.replace("bias", "weight")].size(0))
        tensors[f"transformer.{theirs}"] = tensor.contiguous()
    files = {"config.json": settings}
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer.to_json()
        special = {} if tokenizer.end_of_text is None else {"bos_token": tokenizer.start, "eos_token": tokenizer.start}
        files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    folder = Path(folder).resolve()
    new = folder.with_name(f".{folder.name}.{os.getpid()}")  # so that the folder is there whole or not at all
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
            flush(path)
        if folder.exists():
            folder.rmdir()
        new.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new)
        raise OSError(f"cannot export to {folder} ({error}). Make room.") from None


def main(argv: list[str]):
    from gpt.command_line import CommandLine
    from gpt.tokenizer import TOKENIZERS
    from gpt.training import checkpoint

    command = CommandLine(prog="python -m gpt.pretrained", description=__doc__)
    command.add_argument("what", choices=("check", "export"))
    command.add_argument("source", metavar="WEIGHTS|RUN", help="a name or folder to check; a run to export")
    command.add_argument("folder", nargs="?", metavar="FOLDER", help="where to export to")
    given = command.parse_args(argv)

    def body():
        wanted = {"export": "a run and a new folder", "check": "one source"}[given.what]
        if (given.what == "export") != (given.folder is not None):
            raise Mistake(f"{given.what} takes {wanted}. See --help.")
        if given.what == "export":
            config = checkpoint.read_state(checkpoint.find(given.source))[1]
            export(checkpoint.load_model(given.source), given.folder, TOKENIZERS[config.tokenizer]())
            print(f"exported {given.source} to {given.folder}")
            return 0
        folder = hub.find(given.source)
        agree = True
        for fact in published.check(load(folder), folder):
            agree &= fact.agrees is not False
            mark = {True: " ", False: "!", None: "?"}[fact.agrees]
            print(f"{mark} {fact.what}: {fact.expected}, found {fact.found}", flush=True)
        return 0 if agree else 1

    command.run(body)


if __name__ == "__main__":
    main(sys.argv[1:])

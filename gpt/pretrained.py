"""Published weights <-> ours: GPT-2, whose block is `pre`, and GPT-1, whose block is `post`, in Hugging Face's files.

python -m gpt.pretrained check gpt2            what is published about these weights: expected and found
python -m gpt.pretrained export RUN FOLDER     a run -> a folder that transformers opens
"""

import dataclasses
import difflib
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpt import published
from gpt.config import ModelConfig, TrainConfig, configure, read_json, require_same
from gpt.model import GPT

PLACEMENTS = {"gpt2": "pre", "openai-gpt": "post"}
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
# The same for config.json: our setting -> the published one. GPT-1's "gelu" is the tanh form.
SETTINGS = {
    "context_length": "n_positions",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "d_model": "n_embd",
    "norm_eps": "layer_norm_epsilon",
}
ACTIVATIONS = {
    "gpt2": {"gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu"},
    "openai-gpt": {"gelu": "gelu_tanh", "relu": "relu"},
}
# What changes the computation, and the only value that our model has for it. (An n_inner of 4 n_embd is None too.)
FIXED = {
    "n_inner": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


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


def read_config(folder: Path) -> ModelConfig:
    """The architecture in a folder's config.json. Raises ValueError if it is not GPT-2's or GPT-1's, or not as ours."""
    path = folder / "config.json"
    stored = read_json(path)
    try:
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
        settings = {ours: stored[theirs] for ours, theirs in SETTINGS.items()}
        settings |= {"norm": PLACEMENTS[kind], "activation": ACTIVATIONS[kind][activation]}
        return dataclasses.replace(configure(settings).model, vocab_size=stored["vocab_size"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise ValueError(f"not a GPT-2 or GPT-1 configuration ({path}: {reason}). Name another folder.") from None


def recognizes(source: str | Path) -> bool:
    """Whether `source` is a name of published weights, if perhaps misspelt, and no folder; or a folder with a
    configuration like theirs, unlike that of a run."""
    path = Path(source) / "config.json"
    if path.exists():
        return "model_type" in read_json(path)
    return not Path(source).exists() and bool(difflib.get_close_matches(str(source), published.NAMES, cutoff=0.7))


def base_config(source: str) -> TrainConfig:
    """The settings for training these weights further: their architecture and tokenizer, and a low rate."""
    model = read_config(published.find(source))
    return TrainConfig(model=model, tokenizer=tokenizer_name(model), init=source, optimizer="adamw", lr=3e-5)


def tokenizer_name(config: ModelConfig) -> str:
    """The tokenizer whose ids these weights are for, as far as their number tells. ValueError if it is none of ours."""
    if config.norm == "pre" and 50257 <= config.vocab_size <= 50304:  # some round it up, and leave the rest unused
        return "gpt2"
    if config.vocab_size == 256:
        return "bytes"
    raise ValueError(f"no tokenizer for these weights ({config.vocab_size:,} ids). Use them from Python, with ids.")


def load(source: str | Path, config: ModelConfig | None = None) -> GPT:
    """A published name, or a folder as Hugging Face lays it out (config.json; model.safetensors or its shards) -> the
    model, in float32 on the CPU. A `config` may differ from the stored one in its dropout and in a shorter
    context_length, which crops the table of positions.

    Every stored tensor has one place in the model, or is a causal mask or the tied head, which some files repeat.
    Raises ValueError, with the names, if one is missing, unknown, there twice, or of another shape.
    """
    folder = published.find(source)
    theirs, stored = read_config(folder), published.tensors(folder)
    config, longest = config or theirs, theirs.context_length
    shortened = dataclasses.replace(theirs, context_length=min(longest, config.context_length))
    require_same(shortened, config, f"{folder} has")
    if config.n_layers > len(stored):
        raise ValueError(f"the weights are not all there ({folder}: {len(stored)} tensors). Get them again.")
    with torch.device("meta"):
        model = GPT(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    places = table("gpt2" if config.norm == "pre" else "openai-gpt", config.n_layers)
    weights, wrong = {}, []
    # The embeddings first, since they are the largest, and then the head, to be compared with them.
    for name in sorted(stored, key=lambda name: (".h." in f".{name}", name.endswith("lm_head.weight"))):
        theirs = name.removeprefix("transformer.")
        if theirs == "position_ids" or theirs.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        tied = theirs == "lm_head.weight"
        ours, turned = ("token_embedding.weight", False) if tied else places.get(theirs, (None, False))
        tensor = published.read(stored[name], name)
        if turned:
            tensor = tensor.t() if tensor.dim() == 2 else tensor
        elif ours == "position_embedding.weight" and len(tensor) == longest:
            tensor = tensor[: config.context_length]
        if ours is None or tensor.shape != shapes[ours] or not tensor.is_floating_point():
            wrong.append(f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
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
        raise ValueError(f"the weights are not those of config.json ({folder}: {'; '.join(found)}). Get them again.")
    model.load_state_dict(weights, assign=True)
    return model


def export(model: GPT, folder: str | Path, tokenizer=None):
    """Write a pre-LN model, and its tokenizer if given, into a folder that transformers' AutoModelForCausalLM and
    AutoTokenizer open. Raises ValueError for a model that GPT-2's code does not compute, and for a folder in use."""
    config, folder = model.config, Path(folder)
    unlike = [f"norm {config.norm}"] * (config.norm != "pre")
    unlike += [f"norm_layer {config.norm_layer}"] * (config.norm_layer != "layernorm")
    unlike += ["no final norm"] * (config.final_norm is False)
    if unlike:
        raise ValueError(f"GPT-2 has no such block ({', '.join(unlike)}). Only pre with layernorm can be exported.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"there is something already ({folder.absolute()}). Name a new folder.")
    end_of_text = None if tokenizer is None else tokenizer.end_of_text
    settings = {theirs: getattr(config, ours) for ours, theirs in SETTINGS.items()} | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "activation_function": {ours: theirs for theirs, ours in ACTIVATIONS["gpt2"].items()}[config.activation],
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
    new = folder.absolute().with_name(
        f".{folder.absolute().name}.new"
    )  # so that the folder is there whole or not at all
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for name, content in files.items():
        (new / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(new / "config.json", new / "model.safetensors")
    if folder.exists():
        folder.rmdir()
    os.replace(new, folder)


def main(argv: list[str]):
    from gpt import checkpoint
    from gpt.command_line import CommandLine
    from gpt.tokenizer import TOKENIZERS

    command = CommandLine(prog="python -m gpt.pretrained", description=__doc__)
    command.add_argument("what", choices=("check", "export"))
    command.add_argument("source", metavar="WEIGHTS|RUN", help="a name or folder to check; a run to export")
    command.add_argument("folder", nargs="?", metavar="FOLDER", help="where to export to")
    given = command.parse_args(argv)

    def body():
        wanted = {"export": "a run and a new folder", "check": "one source"}[given.what]
        if (given.what == "export") != (given.folder is not None):
            raise ValueError(f"{given.what} takes {wanted}. See --help.")
        if given.what == "export":
            config = checkpoint.read_state(checkpoint.find(given.source))[1]
            export(checkpoint.load_model(given.source), given.folder, TOKENIZERS[config.tokenizer]())
            print(f"exported {given.source} to {given.folder}")
            return 0
        folder = published.find(given.source)
        agree = True
        for fact in published.check(load(folder), folder):
            agree &= fact.agrees is not False
            mark = {True: " ", False: "!", None: "?"}[fact.agrees]
            print(f"{mark} {fact.what}: {fact.expected}, found {fact.found}", flush=True)
        return 0 if agree else 1

    command.run(body)


if __name__ == "__main__":
    main(sys.argv[1:])

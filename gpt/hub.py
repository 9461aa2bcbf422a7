"""The files of published weights: by name from Hugging Face's hub, or in a folder."""

import dataclasses
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gpt.config import Mistake, ModelConfig, unknown
from gpt.training.files import read_json
from gpt.training.settings import configure

NAMES = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "openai-gpt": "openai-community/openai-gpt",
}
PLACEMENTS = {"gpt2": "pre", "openai-gpt": "post"}
# Our setting -> that of config.json. GPT-1's "gelu" is the tanh form.
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
            try:
                path = hf_hub_download(
                    NAMES[name], file, local_files_only=True
                )  # without asking whether it is the newest
            except LocalEntryNotFoundError:
                path = hf_hub_download(NAMES[name], file)
    except ImportError:
        raise Mistake(f"{name} comes by huggingface-hub (not installed). pip install huggingface-hub") from None
    except Exception as error:  # whatever the hub's library, and the one below it, may raise
        reason = str(error).strip().partition("\n")[0]
        raise Mistake(
            f"cannot download {name} ({NAMES[name]}: {reason}). Connect to the network, set HF_ENDPOINT to a mirror, "
            "or name a folder that has its config.json and model.safetensors."
        ) from None
    return Path(path).parent


def tensors(folder: Path) -> dict[str, Path]:
    """Every tensor of the folder's safetensors, one file or the shards of an index, and the file that has it."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    files = [single]
    if not single.exists() and index.exists():
        shards = read_json(index).get("weight_map")
        files = sorted({folder / str(name) for name in shards.values()}) if isinstance(shards, dict) else []
        if not files or any(path.parent != folder or path.name == ".." for path in files):
            raise Mistake(f"the index is damaged ({index}). Get it again.")
    elif not single.exists() and (folder / "pytorch_model.bin").exists():
        raise Mistake(
            f"pickled weights may run any code ({folder / 'pytorch_model.bin'}). Where you trust them, load them with "
            "transformers, whose save_pretrained() writes model.safetensors."
        )
    found = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    if name in found:
                        raise Mistake(f"two shards have one tensor ({name}, {folder}). Get them again.")
                    found[name] = path
        except (OSError, SafetensorError) as error:
            raise Mistake(f"cannot read the weights ({path}: {error}). Get the file again.") from None
    return found


def read(path: Path, name: str) -> torch.Tensor:
    """One tensor of a safetensors file, mapped from it. The file is opened anew for each, since the pages of all would
    stay in memory as long as it is open."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except SafetensorError as error:
        raise Mistake(f"cannot read {name} ({path}: {error}). Get the file again.") from None


def read_config(folder: Path) -> ModelConfig:
    """The architecture in a folder's config.json. Raises Mistake if it is not GPT-2's or GPT-1's, or not as ours."""
    path = folder / "config.json"
    stored = read_json(path)
    try:
        kind = stored["model_type"]
        if kind not in PLACEMENTS:
            raise Mistake(f"model_type is {kind}; known are {', '.join(PLACEMENTS)}")
        for name, only in FIXED.items():
            usual = 4 * stored["n_embd"] if name == "n_inner" else only
            if stored.get(name, only) not in (only, usual):
                raise Mistake(f"{name} is {stored[name]}, and can only be {usual}")
        activation = stored["afn" if kind == "openai-gpt" else "activation_function"]
        if activation not in ACTIVATIONS[kind]:
            raise Mistake(f"the activation is {activation}; known are {', '.join(ACTIVATIONS[kind])}")
        settings = {ours: stored[theirs] for ours, theirs in SETTINGS.items()}
        settings |= {"norm": PLACEMENTS[kind], "activation": ACTIVATIONS[kind][activation]}
        return dataclasses.replace(configure(settings).model, vocab_size=stored["vocab_size"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise Mistake(f"not a GPT-2 or GPT-1 configuration ({path}: {reason}). Name another folder.") from None

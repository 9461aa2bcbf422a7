"""Weights of GPT-2 and OpenAI GPT that are a formula, so that no file has to be kept, and what they give: by
transformers, and by the equations in numpy.

python tests/golden.py      prints LOGITS again; wants transformers, which the project does without
"""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

SIZE = {"vocab_size": 7, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 3}
CONFIGS = {
    "gpt2": {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, **SIZE},
    "openai-gpt": {"model_type": "openai-gpt", "afn": "gelu", "layer_norm_epsilon": 1e-5, **SIZE},
}
TOKENS = [[3, 1, 4, 1, 5, 0, 2, 6], [0, 1, 1, 2, 3, 5, 1, 6]]
# By transformers 5.24.0: (row, position 0, 3 and 7, id).
LOGITS = {
    "gpt2": [
        [
            [-2.37637, 3.82793, -1.59923, -2.16701, 3.84984, -1.83134, -1.94784],
            [-2.65363, 3.86928, -1.36492, -2.45171, 3.91121, -1.61038, -2.2387],
            [-3.41646, 3.82901, -0.56026, -3.24713, 3.93266, -0.83724, -3.06312],
        ],
        [
            [-2.39031, 3.83059, -1.58805, -2.18128, 3.85347, -1.82085, -1.96238],
            [-3.61448, 3.76656, -0.29739, -3.4577, 3.88848, -0.58078, -3.28529],
            [-3.60174, 3.77148, -0.31524, -3.44408, 3.89219, -0.59825, -3.27085],
        ],
    ],
    "openai-gpt": [
        [
            [1.99618, 1.32292, -3.37014, 2.17723, 1.10892, -3.32893, 2.34843],
            [0.1826, 3.15792, -3.46234, 0.43799, 3.00745, -3.56147, 0.69141],
            [1.70846, 1.7167, -3.49138, 1.90937, 1.50835, -3.47591, 2.10165],
        ],
        [
            [2.02665, 1.27691, -3.35282, 2.20525, 1.0625, -3.30873, 2.37388],
            [1.87415, 1.50133, -3.4334, 2.06452, 1.28924, -3.40349, 2.24555],
            [1.68668, 1.74394, -3.49789, 1.88889, 1.53613, -3.48428, 2.08257],
        ],
    ],
}


def weights(model_type: str) -> dict[str, np.ndarray]:
    """Every parameter by its published name and in its published shape, matrices [in, out]: element i of the k-th is
    0.4 sin(1 + k + 0.7 i), and 1 more in the weight of a norm."""
    d = SIZE["n_embd"]
    tokens, positions = ("wte", "wpe") if model_type == "gpt2" else ("tokens_embed", "positions_embed")
    shapes = {f"{tokens}.weight": (SIZE["vocab_size"], d), f"{positions}.weight": (SIZE["n_positions"], d)}
    modules = {"ln_f": (d,)} if model_type == "gpt2" else {}
    for i in range(SIZE["n_layer"]):
        modules |= {f"h.{i}.ln_1": (d,), f"h.{i}.attn.c_attn": (d, 3 * d), f"h.{i}.attn.c_proj": (d, d)}
        modules |= {f"h.{i}.ln_2": (d,), f"h.{i}.mlp.c_fc": (d, 4 * d), f"h.{i}.mlp.c_proj": (4 * d, d)}
    for name, shape in modules.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}
    made = {}
    for k, (name, shape) in enumerate(shapes.items()):
        values = 0.4 * np.sin(1 + k + 0.7 * np.arange(np.prod(shape))).reshape(shape)
        made[name] = (values + ("ln_" in name and name.endswith("weight"))).astype(np.float32)
    return made


def oracle(model_type, arrays, tokens, n_heads):
    """(T,) tokens -> (T, vocab_size) logits by the equations alone, in float64, from the published names."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}

    def norm(x, name):
        deviation = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((deviation**2).mean(-1, keepdims=True) + 1e-5)
        return deviation / scale * w[name + ".weight"] + w[name + ".bias"]

    def linear(x, name):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    def attention(x, name):
        T, d = x.shape
        q, k, v = (part.reshape(T, n_heads, -1) for part in np.split(linear(x, name + ".c_attn"), 3, axis=-1))
        y = np.empty_like(q)
        for head in range(n_heads):
            scores = q[:, head] @ k[:, head].T / np.sqrt(d / n_heads)
            scores[np.triu_indices(T, 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            y[:, head] = p / p.sum(-1, keepdims=True) @ v[:, head]
        return linear(y.reshape(T, d), name + ".c_proj")

    def mlp(x, name):
        z = linear(x, name + ".c_fc")
        z = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        return linear(z, name + ".c_proj")

    wte, wpe = ("wte", "wpe") if model_type == "gpt2" else ("tokens_embed", "positions_embed")
    x = w[wte + ".weight"][tokens] + w[wpe + ".weight"][: len(tokens)]
    for h in (f"h.{i}" for i in range(sum(name.endswith(".ln_1.bias") for name in w))):
        if model_type == "gpt2":
            x = x + attention(norm(x, h + ".ln_1"), h + ".attn")
            x = x + mlp(norm(x, h + ".ln_2"), h + ".mlp")
        else:
            x = norm(x + attention(x, h + ".attn"), h + ".ln_1")
            x = norm(x + mlp(x, h + ".mlp"), h + ".ln_2")
    return (norm(x, "ln_f") if model_type == "gpt2" else x) @ w[wte + ".weight"].T


def folder(path: Path, model_type="gpt2", /, *, change=lambda tensors: tensors, **settings) -> Path:
    """Make a folder as on the hub, with the golden weights unless `change`d."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[model_type] | settings), encoding="utf-8")
    tensors = {name: torch.from_numpy(array) for name, array in weights(model_type).items()}
    save_file(change(tensors), path / "model.safetensors", metadata={"format": "pt"})
    return path


def transformers():
    """The library, or a skip; importing it may warn of things that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


def main():
    library = transformers()
    for model_type, settings in CONFIGS.items():
        model = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(**settings)).eval()
        tensors = {name: torch.from_numpy(array) for name, array in weights(model_type).items()}
        missing, unexpected = model.transformer.load_state_dict(tensors, strict=False)
        assert not unexpected and not [name for name in missing if "attn.bias" not in name], missing
        with torch.no_grad():
            logits = model(torch.tensor(TOKENS)).logits[:, [0, 3, 7]]
        print(f'    "{model_type}": {[[[round(x, 5) for x in row] for row in rows] for rows in logits.tolist()]},')


if __name__ == "__main__":
    main()

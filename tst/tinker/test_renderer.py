"""The renderer of a run over a real fast tokenizer, in the threads that the cookbook renders in."""

from concurrent.futures import ThreadPoolExecutor

from stand_in.bundles import task, write_bundle
from stand_in.model import RENDERER
from stand_in.play import builder
from tinker_cookbook.tokenizer_utils import register_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MODEL = "stand-in/fast"


def fast_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of transformers' fast kind, whose tokens are words."""
    tokenizer = Tokenizer(models.WordLevel({"word": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_many_threads_can_encode_at_once(tmp_path):
    """A fast tokenizer alone can't set an option for one thread while another encodes: it says "Already borrowed"."""
    register_tokenizer(MODEL, fast_tokenizer)
    bundle = write_bundle(tmp_path / "b", {"write": task("Write 1.")})
    tokenizer = builder(bundle, model_name=MODEL, renderer_name=RENDERER).renderer().tokenizer

    def encode(turn: int) -> int:
        return len(tokenizer.encode("word " * 2000, add_special_tokens=False, split_special_tokens=turn % 2 == 0))

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(encode, range(400))) == {2000}

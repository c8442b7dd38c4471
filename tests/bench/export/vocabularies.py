"""Write tokenizers that llama.cpp's converters take, in llama.cpp's environment: PYTHON vocabularies.py FOLDER

They know a tokenizer of bytes by a hash of what it makes of a text, so GPT-2's is made from the vocabulary in llama.cpp's own sources.
"""

import io
import sys
from pathlib import Path

SOURCES = Path(sys.prefix) / "llama.cpp"
TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs, and how vexingly quick daft zebras jump."


def sentencepiece_model(folder: Path) -> None:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT]), model_writer=model, vocab_size=320, byte_fallback=True, hard_vocab_limit=False,
        pad_id=0, bos_id=1, eos_id=2, unk_id=3, minloglevel=2,
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())


def gpt2(folder: Path) -> None:
    sys.path.insert(0, str(SOURCES / "gguf-py"))
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(SOURCES / "models" / "ggml-vocab-gpt-2.gguf").fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    end = tokens[-1]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end).save_pretrained(folder)


if __name__ == "__main__":
    sentencepiece_model(Path(sys.argv[1]) / "sentencepiece")
    gpt2(Path(sys.argv[1]) / "gpt2")

"""Tiny fast tokenizers, trained in memory on a few sentences of English.

They imitate what matters about real ones: byte-level BPE with leading-space tokens as in GPT-2, or pieces
with the "▁" marker and byte fallback as in Llama 2; a BOS token that the post-processor adds or does not add;
no pad token in some; a chat template that writes the BOS text itself, so its output must not get another one.
"""

from __future__ import annotations

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, UNK = "<s>", "</s>", "<pad>", "<unk>"

# Few distinct words, each often: they become single tokens although there is room for few merges only.
_SENTENCES = (
    "The capital of France is the city of Paris.",
    "The capital of Italy is the city of Rome.",
    "The capital of England is the city of London.",
    "Paris is in France and London is in England and Rome is in Italy.",
    "The city is old and the river is long.",
    "The king of France and the queen of England are in the city.",
    "The Eiffel Tower is in the city of Paris.",
    "John and Mary are in the city of Rome.",
    "John gave a book to Mary and Mary gave a book to John.",
)
_ASCII = [chr(code) for code in range(0x20, 0x7F)]
_LINE_CONTROL = [0x09, 0x0A]
# Lead bytes of accented letters, typographic quotes and dashes and most emoji, and all continuation bytes.
# The other bytes are left out, since 256 of them would fill the vocabulary of the tiny models.
_NON_ASCII_BYTES = [0xC2, 0xC3, 0xE2, 0xF0, *range(0x80, 0xC0)]
_MIN_MERGES = 60

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _byte_characters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def _train(tokenizer: Tokenizer, vocab_size: int, specials: list[str], alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        # the sentences hold no character outside the alphabet, so this is all of it
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES * 4, trainer)


def _byte_level(vocab_size: int, specials: list[str], extra_bytes: list[int]) -> Tokenizer:
    character = _byte_characters()
    alphabet = [character[byte] for byte in [*map(ord, _ASCII), *_LINE_CONTROL, *extra_bytes]]
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, vocab_size, specials, alphabet)
    return tokenizer


def _sentencepiece(vocab_size: int, specials: list[str], extra_bytes: list[int]) -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in [*_LINE_CONTROL, *extra_bytes]]
    alphabet = ["▁", *_ASCII[1:]]
    trained = Tokenizer(models.BPE(unk_token=UNK))
    # learn no piece that joins a word with the punctuation after it
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(replacement="▁"), pre_tokenizers.Punctuation()]
    )
    _train(trained, vocab_size - len(byte_tokens), specials, alphabet)
    state = json.loads(trained.to_str())["model"]
    pieces = sorted(state["vocab"], key=state["vocab"].__getitem__)
    # the order of Llama 2: special tokens, bytes, pieces
    ordered = specials + byte_tokens + pieces[len(specials) :]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(ordered)},
            merges=[tuple(merge) for merge in state["merges"]],
            unk_token=UNK,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # Llama 2 marks spaces in the normalizer; a Metaspace pre-tokenizer would lose the leading space of a text
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


@cache
def _serialized(vocab_size: int, pad: bool, sentencepiece: bool) -> str:
    """The tokenizer without its post-processor, as JSON; cached, since tests ask for it many times."""
    # the ids of padding, BOS and EOS are those of the tiny models; Llama 2 has its unknown token at 0 instead
    specials = [PAD, BOS, EOS, UNK] if pad else [UNK, BOS, EOS]
    base = len(specials) + len(_ASCII) + len(_LINE_CONTROL)
    if vocab_size < base + _MIN_MERGES:
        raise ValueError(f"vocab_size must be at least {base + _MIN_MERGES}, got {vocab_size}")
    extra_bytes = _NON_ASCII_BYTES if vocab_size >= base + len(_NON_ASCII_BYTES) + _MIN_MERGES else []
    build = _sentencepiece if sentencepiece else _byte_level
    return build(vocab_size, specials, extra_bytes).to_str()


def tiny_tokenizer(
    vocab_size: int = 256,
    *,
    bos: bool = False,
    pad: bool = True,
    sentencepiece: bool = False,
    chat: bool = False,
) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are all below `vocab_size` and which reproduces ordinary English text.

    A BOS token is always defined; `bos` says whether encoding a text puts it in front.
    """
    tokenizer = Tokenizer.from_str(_serialized(vocab_size, pad, sentencepiece))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS}:0 $A:0",
            pair=f"{BOS}:0 $A:0 {BOS}:1 $B:1",
            special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=PAD if pad else None,
        clean_up_tokenization_spaces=False,
    )
    if chat:
        fast.chat_template = _CHAT_TEMPLATE
    return fast

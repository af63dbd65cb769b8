"""Prompts are what the model saw: alone or together, padded or not, special tokens once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.reading import forwards, fresh, held, own_logits
from support.tiny_models import tiny_model
from support.tiny_tokenizer import BOS, EOS, tiny_tokenizer
from tokenizers import processors

from murano.errors import InputError
from murano.lens import logit_lens, reread
from murano.model import MuranoModel
from murano.model.batching import make_batches
from murano.prompts import Prompt
from murano.steps import LogitLens

FAMILIES = [
    "gpt2",
    "llama",
    "opt",
    "bloom",
    "gpt_neox",
    "gemma2",
    "mamba",
    "falcon",
    "rwkv",
    "deepseek_v32",
    "gemma3n_text",
    "recurrent_gemma",
]
SPARSE = {"deepseek_v32"}
TEXTS = [
    "The capital of France is",
    "Paris",
    "John gave a book to Mary and Mary gave a book to",
    "The river is old",
    "The city is old and the river is long.",
]


def check_same(alone: Any, together: Any, prompt: int, tolerance: float = 1e-5) -> None:
    """One prompt's cells, right-aligned, are those of the prompt alone."""
    n = int(alone.attention_mask[0].sum())
    assert torch.equal(
        together.attention_mask[prompt].nonzero().flatten(), torch.arange(together.input_ids.shape[1])[-n:]
    )
    assert torch.equal(together.input_ids[prompt, -n:], alone.input_ids[0])
    assert torch.equal(together.top_ids[:, prompt, -n:], alone.top_ids[:, 0])
    assert (together.top_probs[:, prompt, -n:] - alone.top_probs[:, 0]).abs().max() < tolerance
    assert (together.entropy[:, prompt, -n:] - alone.entropy[:, 0]).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_or_together(family: str) -> None:
    model = held(family)
    together = logit_lens(model, TEXTS, layers=["embeddings", "all"], top_k=3)
    assert model.check_readout().pads == (family not in SPARSE)
    for prompt, text in enumerate(TEXTS):
        check_same(logit_lens(model, text, layers=["embeddings", "all"], top_k=3), together, prompt)
        last = own_logits(model.hf_model, torch.tensor([model.encode(text)]))[0, -1].softmax(-1)
        assert (together.top_probs[-1, prompt, -1] - last.topk(3).values).abs().max() < 1e-5
    in_pieces = logit_lens(
        model, TEXTS, layers=["embeddings", "all"], top_k=3, max_batch_tokens=20, max_chunk_bytes=3 * 1024
    )
    assert torch.equal(in_pieces.top_ids, together.top_ids)
    assert (in_pieces.top_probs - together.top_probs).abs().nan_to_num(0).max() < 1e-5
    captured = model.capture(TEXTS, 0)
    for prompt, text in enumerate(TEXTS):
        (rows,) = model.capture(text, 0).values()
        (all_rows,) = captured.values()
        assert (all_rows[prompt, -rows.shape[1] :] - rows[0]).abs().max() < 1e-5
        assert all_rows[prompt, : -rows.shape[1]].isnan().all()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("axk2", torch.float32),
        ("axk2", torch.bfloat16),
        ("deepseek_v32", torch.float32),
        ("deepseek_v32", torch.bfloat16),
        ("dots3_note", torch.float32),
        ("dots3_note", torch.bfloat16),
        ("glm_moe_dsa", torch.float32),
        ("glm_moe_dsa", torch.bfloat16),
    ],
)
def test_families_that_cannot_be_padded_run_in_batches_of_one_length(family: str, dtype: torch.dtype) -> None:
    """What their attention picks depends on how long the batch is: padded, they would be wrong by half of the largest logit."""
    model = held(family, dtype)
    assert not model.check_readout().pads
    assert "only prompts of one length share a batch" in str(model.check_readout())
    prompts = [[20, 21, 22, 23, 24], [30, 31], [40, 41, 42, 43, 44], [50, 51, 52, 53, 54, 55, 56, 57, 58]]
    with forwards(model.hf_model) as ran:
        model.ending  # noqa: B018 - found by a forward of its own
        ran[0] = 0
        together = logit_lens(model, prompts)
        assert ran[0] == 3  # the two of length 5 share one
    for prompt, ids in enumerate(prompts):
        check_same(logit_lens(model, [ids]), together, prompt, 1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "mamba"])
@pytest.mark.parametrize("setting", ["left", "right", "no pad token", "pad is eos"])
def test_how_the_tokenizer_pads_does_not_matter(family: str, setting: str) -> None:
    model = held(family)
    expected = logit_lens(model, [[20, 21, 22, 23], [40], [50, 51]])
    tokenizer = tiny_tokenizer(pad=setting != "no pad token")
    if setting in ("left", "right"):
        tokenizer.padding_side = setting
    if setting == "pad is eos":
        tokenizer.pad_token = EOS
    assert (tokenizer.pad_token is None) == (setting == "no pad token")
    other = MuranoModel(model.hf_model, tokenizer=tokenizer)
    lens = logit_lens(other, [[20, 21, 22, 23], [40], [50, 51]])
    assert torch.equal(lens.top_ids, expected.top_ids)
    assert torch.equal(lens.top_probs.nan_to_num(-1), expected.top_probs.nan_to_num(-1))
    assert lens.attention_mask.tolist() == [[True] * 4, [False] * 3 + [True], [False] * 2 + [True] * 2]
    assert lens.position_index.tolist() == [[0, 1, 2, 3], [-1, -1, -1, 0], [-1, -1, 0, 1]]


def test_a_prompt_that_holds_the_pad_token_is_not_masked_there() -> None:
    """The mask comes from lengths, never from comparing ids with the pad id."""
    model = held("llama")
    pad = model.tokenizer.pad_token_id
    ids = [20, pad, 21, pad]
    lens = logit_lens(model, [ids, [30, 31]])
    assert lens.attention_mask.tolist() == [[True] * 4, [False, False, True, True]]
    expected = own_logits(model.hf_model, torch.tensor([ids])).softmax(-1)
    assert (lens.top_probs[-1, 0] - expected[0].topk(5).values).abs().max() < 1e-5


def test_the_last_column_is_every_prompts_last_token() -> None:
    model = held("gpt2")
    encoded = [model.encode(text) for text in TEXTS]
    lens = logit_lens(model, TEXTS)
    assert lens.input_ids[:, -1].tolist() == [ids[-1] for ids in encoded]
    last = logit_lens(model, TEXTS, positions="last")
    assert last.input_ids.shape == (len(TEXTS), 1)
    assert last.position_index.flatten().tolist() == [len(ids) - 1 for ids in encoded]
    assert (last.top_probs[..., -1, :] - lens.top_probs[..., -1, :]).abs().max() < 1e-6
    picked = logit_lens(model, TEXTS[:1], positions=[-1, 0, 2])
    assert picked.position_index.tolist() == [[len(encoded[0]) - 1, 0, 2]]
    assert picked.input_ids.tolist() == [[encoded[0][-1], encoded[0][0], encoded[0][2]]]
    assert torch.equal(picked.top_ids[:, 0], lens.top_ids[:, 0][:, lens.position_index[0] >= 0][:, [-1, 0, 2]])


def test_bos_exactly_once() -> None:
    tokenizer = tiny_tokenizer(bos=True, chat=True)
    model = MuranoModel(held("llama").hf_model, tokenizer=tokenizer)
    bos = tokenizer.bos_token_id
    plain = tokenizer("The city", add_special_tokens=False)["input_ids"]
    assert model.encode("The city") == [bos, *plain]
    assert model.encode(f"{BOS}The city") == [bos, *plain]
    without = MuranoModel(held("llama").hf_model, tokenizer=tiny_tokenizer())
    assert without.encode("The city") == plain
    assert without.encode(f"{BOS}The city") == [bos, *plain]
    chat = model.encode(Prompt(messages=({"role": "user", "content": "The city"},)))
    assert chat.count(bos) == 1
    assert chat[0] == bos
    assert tokenizer.decode(chat) == f"{BOS}[user] The city{EOS}\n[assistant]"
    lens = logit_lens(model, [f"{BOS}The city", "The city", [{"role": "user", "content": "The city"}]])
    assert lens.input_words[0][-3:] == [BOS, "The", " city"]
    assert lens.input_words[1][-3:] == [BOS, "The", " city"]
    assert lens.input_words[2][0] == BOS
    assert BOS not in lens.input_words[2][1:]


def test_token_ids_are_taken_as_they_are() -> None:
    model = fresh("llama", bos=True)
    assert model.encode(Prompt(token_ids=(1, 1, 20))) == [1, 1, 20]
    assert logit_lens(model, [[1, 1, 20]]).input_ids.tolist() == [[1, 1, 20]]


def test_a_chat_that_ends_with_the_assistants_words_is_continued() -> None:
    tokenizer = tiny_tokenizer(chat=True)
    model = MuranoModel(held("llama").hf_model, tokenizer=tokenizer)
    messages = ({"role": "user", "content": "The river"}, {"role": "assistant", "content": "is old"})
    assert (
        tokenizer.decode(model.encode(Prompt(messages=messages))) == f"{BOS}[user] The river{EOS}\n[assistant] is old"
    )


def test_a_chat_without_a_template_is_refused() -> None:
    model = held("llama")
    with pytest.raises(InputError, match="Prompt 0 can't be read .*has no chat template"):
        logit_lens(model, [[{"role": "user", "content": "The city"}]])


@pytest.mark.parametrize("template", [f"{BOS} $A {EOS}", f"$A {EOS}", f"{BOS} $A {EOS} {EOS}"])
def test_what_a_tokenizer_puts_at_the_end_is_dropped(template: str) -> None:
    """BERT's tokenizer closes with [SEP], some of T5's and XGLM's kin with </s>: then nothing is left to predict."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(BOS, tokenizer.bos_token_id), (EOS, tokenizer.eos_token_id)]
    )
    assert tokenizer("The city")["input_ids"][-1] == tokenizer.eos_token_id
    model = MuranoModel(held("bert").hf_model, tokenizer=tokenizer)
    plain = tokenizer("The city", add_special_tokens=False)["input_ids"]
    front = [tokenizer.bos_token_id] if template.startswith(BOS) else []
    assert model.encode("The city") == [*front, *plain]
    assert model.encode(f"The city{EOS}") == [*front, *plain, tokenizer.eos_token_id]  # written by the user: kept


def test_leading_spaces_of_sentencepiece_are_shown() -> None:
    model = MuranoModel(held("llama").hf_model, tokenizer=tiny_tokenizer(sentencepiece=True, bos=True))
    lens = logit_lens(model, "The capital of France is")
    assert lens.input_words[0] == [BOS, " The", " capital", " of", " France", " is"]
    assert all(isinstance(word, str) for layer in lens.predicted_words for row in layer for word in row)
    byte_level = MuranoModel(held("llama").hf_model, tokenizer=tiny_tokenizer())
    assert logit_lens(byte_level, "The capital of France is").input_words[0] == [
        "The",
        " capital",
        " of",
        " France",
        " is",
    ]


def test_ids_beyond_the_tokenizer_have_a_name() -> None:
    """Embeddings are often padded to a round number of rows: the model may predict what the tokenizer has no piece for."""
    model = MuranoModel(held("llama").hf_model, tokenizer=tiny_tokenizer(200))
    last = len(model.tokenizer) - 1
    assert last < 200
    assert (model.words[last], model.words[last + 1], model.words[255]) == (
        model.tokenizer.decode([last]),
        f"⟨{last + 1}⟩",
        "⟨255⟩",
    )
    lens = logit_lens(model, [[20, 230, 255]], top_k=256)
    assert lens.input_words[0][1:] == ["⟨230⟩", "⟨255⟩"]
    assert {"⟨201⟩", "⟨255⟩"} <= {lens.words[i] for i in lens.top_ids.flatten().tolist()}


@pytest.mark.parametrize("ids", [[20, 256], [-1, 20], [20, 10_000]])
def test_ids_beyond_the_embedding_are_refused_before_any_forward(ids: list[int]) -> None:
    model = held("llama")
    assert model.check_readout().exact
    bad = next(i for i in ids if not 0 <= i < 256)
    with forwards(model.hf_model) as ran:
        for read in (logit_lens, lambda m, p: m.capture(p, 0)):
            with pytest.raises(
                InputError,
                match=rf"Prompt 1 has token id {bad}, but the model embeds ids 0 to 255 only.*does not belong",
            ):
                read(model, [[20], ids])
    assert ran == [0]


def test_another_models_tokenizer_is_noticed() -> None:
    tokenizer = tiny_tokenizer(300)
    text = next(
        word for i in range(256, 300) if (word := tokenizer.decode([i])).strip() and tokenizer(word)["input_ids"] == [i]
    )
    model = MuranoModel(tiny_model("gpt2"), tokenizer=tokenizer)
    with pytest.raises(InputError, match="this tokenizer does not belong to this model"):
        logit_lens(model, text)


def test_bad_prompts_are_left_out_on_request() -> None:
    model = held("llama")
    with pytest.warns(UserWarning, match="^1 of 3 prompts was left out. Prompt 1 has token id 999"):
        lens = logit_lens(model, [[20, 21], [20, 999], [30]], on_error="skip")
    assert lens.notes[0].startswith("Prompt 1 has token id 999")
    assert lens.attention_mask.tolist() == [[True, True], [False, False], [False, True]]
    assert lens.top_probs[:, 1].isnan().all()
    assert lens.input_ids[1].tolist() == [-1, -1]
    assert torch.equal(lens.top_ids[:, 0], logit_lens(model, [[20, 21]]).top_ids[:, 0])
    with pytest.raises(InputError, match="Every prompt was left out"):
        logit_lens(model, [[999]], on_error="skip")


def test_what_is_no_prompt_is_left_out_on_request() -> None:
    model = held("llama")
    prompts: list[Any] = [[20, 21], [], [999], None, "  ", b"ab", Prompt(), [30]]
    with pytest.warns(
        UserWarning, match="^6 of 8 prompts were left out. Prompt 1 is empty: .*lens.notes has the others"
    ):
        lens = logit_lens(model, prompts, on_error="skip", keep="residuals")
    assert [note.split(" (")[0][:24] for note in lens.notes] == [
        "Prompt 1 is empty: [].",
        "Prompt 2 has token id 99",
        "Prompt 3 is a NoneType: ",
        "Prompt 4 holds only whit",
        "Prompt 5 is a bytes: b'a",
        "Prompt 6 is empty: ''.",
    ]
    assert lens.lengths.tolist() == [2, 0, 0, 0, 0, 0, 0, 1]
    alone = logit_lens(model, [[20, 21], [30]])
    assert torch.equal(lens.top_ids[:, [0, 7]], alone.top_ids)
    again = reread(lens, model, targets=[5, *[None] * 6, 6])
    assert torch.equal(again.top_ids, lens.top_ids)
    assert again.notes == lens.notes
    with pytest.raises(InputError, match="^Prompt 1 is empty: ..[.] With on_error='skip' it is left out[.]$"):
        logit_lens(model, prompts)
    assert lens.prompts is not None
    with pytest.raises(InputError, match="^Prompt 1 can't be read .it is empty.*on_error='skip' it is left out"):
        logit_lens(model, lens.prompts)


def test_numbers_of_numpy_are_numbers() -> None:
    model = held("gpt2")
    plain = logit_lens(model, [[20, 21, 22]], positions=[0, 2], top_k=3)
    options: dict[str, Any] = {
        "positions": np.array([0, 2]),
        "top_k": np.int64(3),
        "max_chunk_bytes": np.int64(1 << 20),
    }
    assert torch.equal(logit_lens(model, [[20, 21, 22]], **options).top_ids, plain.top_ids)
    assert repr(LogitLens(model, top_k=np.int64(3))).endswith("top_k=3)")


def test_batches_keep_within_their_size() -> None:
    encoded = [[1] * n for n in (3, 9, 1, 4, 9, 2, 30)]
    batches = make_batches(encoded, max_tokens=18, mix_lengths=True)
    assert sorted(p for batch in batches for p in batch.prompts) == list(range(7))
    assert batches[0].prompts == (6,)  # longer than a batch: one of its own
    assert all(batch.ids.numel() <= 18 for batch in batches[1:])
    assert all(batch.ids.shape == (len(batch.prompts), max(batch.lengths)) for batch in batches)
    same = make_batches(encoded, max_tokens=18, mix_lengths=False)
    assert all(len(set(batch.lengths)) == 1 for batch in same)
    assert make_batches([[5, 6], [7]], max_tokens=9, mix_lengths=True)[0].ids.tolist() == [[5, 6], [7, 7]]

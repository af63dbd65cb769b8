"""The main job on the bundled model, against plain transformers and the figures known for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from murano import Address, MuranoModel, Pipeline, keys, load_logit_lens, logit_attribution, shipped_prompts
from murano.artifacts.logit_attribution import summed
from murano.lens import logit_lens
from murano.steps import LoadPrompts, LogitLens, Plot, Save

EIFFEL = "The Eiffel Tower is in the city of"
FRANCE = "The capital of France is"
MARY = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def model() -> MuranoModel:
    return MuranoModel(dtype=torch.float32)


def naive_rows(model: MuranoModel, text: str) -> torch.Tensor:
    """Probabilities [layer, position, vocab] by plain transformers: hooks on its layers, its norm, its head, a softmax."""
    hf = model.hf_model
    ids = model.tokenizer(text, return_tensors="pt")["input_ids"]
    outputs: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda m, a, out: outputs.append(out)) for layer in hf.model.layers]
    with torch.no_grad():
        hf(ids)
        rows = torch.stack([hf.lm_head(hf.model.norm(out))[0] for out in outputs])
    for hook in hooks:
        hook.remove()
    # Not in float32: without AVX-512 a row of 49 152 costs softmax's sum 2e-5.
    return rows.double().softmax(-1).float()


def test_what_the_bundled_model_is(model: MuranoModel) -> None:
    assert model.model_id == "SmolLM2-135M-Instruct"
    assert (model.n_layers, model.n_heads, model.d_model, model.vocab_size) == (30, 9, 576, 49152)


@pytest.mark.parametrize(
    ("text", "word", "probability"), [(FRANCE, " Paris", 0.773), (EIFFEL, " Paris", 0.656), (MARY, " Mary", 0.923)]
)
def test_known_answers(model: MuranoModel, text: str, word: str, probability: float) -> None:
    lens = logit_lens(model, [text])
    assert lens.predicted_words[-1][0][-1] == word
    assert float(lens.max_probs[-1, 0, -1]) == pytest.approx(probability, abs=0.002)


def test_every_row_equals_a_naive_computation(model: MuranoModel) -> None:
    lens = logit_lens(model, [EIFFEL], top_k=5)
    naive = naive_rows(model, EIFFEL)
    probs, _ = naive.topk(5, dim=-1)
    torch.testing.assert_close(lens.top_probs[:, 0], probs, atol=1e-5, rtol=0)
    entropy = torch.special.entr(naive.double()).sum(-1).float()
    torch.testing.assert_close(lens.entropy[:, 0], entropy, atol=1e-4, rtol=0)
    clear = (probs[..., 0] - probs[..., 1]) > 1e-5
    assert torch.equal(lens.predicted_tokens[:, 0][clear], naive.argmax(-1)[clear])


def test_last_block_through_the_readout_is_the_model_to_the_bit(model: MuranoModel) -> None:
    ids = torch.tensor([model.encode(EIFFEL)])
    with torch.no_grad():
        own = model.hf_model(ids).logits
    assert torch.equal(model.decode(model.capture(EIFFEL, "L29.resid_post")[Address(29)]), own)


def test_embeddings_are_the_tokens_rows(model: MuranoModel) -> None:
    ids = torch.tensor([model.encode(FRANCE)])
    found = model.capture(FRANCE, "embeddings")[Address(None, "embeddings")]
    assert torch.equal(found, model.hf_model.get_input_embeddings()(ids))


def test_a_batch_gives_what_each_prompt_gives_alone(model: MuranoModel) -> None:
    texts = [EIFFEL, FRANCE, MARY]
    together = logit_lens(model, texts)
    for index, text in enumerate(texts):
        alone = logit_lens(model, text)
        n = alone.input_ids.shape[1]
        # transformers' own left-padded batch differs from its own single prompts by up to 1.2e-5 on these texts: products of another
        # shape round differently, and no reader of residuals can undo that.
        torch.testing.assert_close(together.top_probs[:, index, -n:], alone.top_probs[:, 0], atol=2e-5, rtol=0)
        assert together.input_words[index][-n:] == alone.input_words[0]
        assert not together.attention_mask[index, :-n].any()


def test_chunks_and_batches_do_not_change_the_numbers(model: MuranoModel) -> None:
    texts = [EIFFEL, FRANCE, MARY]
    usual = logit_lens(model, texts)
    small = logit_lens(model, texts, max_chunk_bytes=7 * 4 * model.vocab_size, max_batch_tokens=1)
    torch.testing.assert_close(small.top_probs, usual.top_probs, atol=2e-5, rtol=0, equal_nan=True)
    torch.testing.assert_close(small.entropy, usual.entropy, atol=1e-4, rtol=0, equal_nan=True)


def test_last_position_only(model: MuranoModel) -> None:
    whole, last = logit_lens(model, [EIFFEL, FRANCE]), logit_lens(model, [EIFFEL, FRANCE], positions="last")
    assert last.max_probs.shape == (30, 2, 1)
    torch.testing.assert_close(last.top_probs, whole.top_probs[:, :, -1:], atol=1e-5, rtol=0)


def test_layers_in_the_users_order_and_the_embedding_row(model: MuranoModel) -> None:
    lens = logit_lens(model, [FRANCE], layers=["embeddings", 29, -2, "L3.resid_pre", "block_output[2]", "ln_final"])
    read = ["embeddings", "L29.resid_post", "L28.resid_post", "L3.resid_pre", "L2.resid_post", "ln_final"]
    assert [str(a) for a in lens.addresses] == read
    assert torch.equal(lens.top_ids[1], lens.top_ids[5])  # after the norm it is the same reading
    torch.testing.assert_close(
        lens.top_probs[3], lens.top_probs[4], atol=1e-6, rtol=0
    )  # what leaves block 2 enters block 3


def test_kept_residuals_decode_to_the_same_predictions(model: MuranoModel) -> None:
    lens = logit_lens(model, [FRANCE], layers=[0, 29], keep="residuals")
    logits = lens.decode(model)
    assert logits.shape == (2, 1, 5, 49152)
    torch.testing.assert_close(logits.double().softmax(-1).amax(-1).float(), lens.max_probs, atol=1e-5, rtol=0)


def test_the_walk_through_as_a_researcher_types_it(model: MuranoModel, tmp_path: Path) -> None:
    results = Pipeline([LoadPrompts([EIFFEL]), LogitLens(model)]).run()
    lens = results[keys.LOGIT_LENS]
    assert tuple(lens.max_probs.shape) == (30, 1, 9)
    assert lens.input_words[0] == ["The", " E", "iffel", " Tower", " is", " in", " the", " city", " of"]
    Plot(output_dir=tmp_path / "plots")(results)
    assert all(Path(file).stat().st_size > 10_000 for file in results[keys.PLOTS])
    lines = []
    for layer_index, address in enumerate(lens.addresses):
        word = lens.predicted_words[layer_index][0][-1]
        prob = float(lens.max_probs[layer_index, 0, -1])
        lines.append(f"{address!s:>16}  {word!r:<16} {prob:5.3f}  {'#' * int(prob * 30)}".rstrip())
    assert lines[-1] == "  L29.resid_post  ' Paris'         0.656  ###################"
    assert lens.table().splitlines()[1:] == lines
    run_dir = Save(output_dir=tmp_path, run_name="logit_lens", model_id=model.model_id)(results)[keys.OUTPUT_DIR]
    reloaded = load_logit_lens(f"{run_dir}/logit_lens/logit_lens.pt")
    assert torch.equal(reloaded.max_probs, lens.max_probs)
    assert torch.equal(reloaded.top_ids, lens.top_ids)
    assert reloaded.predicted_words[-1][0] == lens.predicted_words[-1][0]
    assert reloaded.addresses == lens.addresses


@pytest.mark.filterwarnings("ignore:.*of several tokens")
def test_attribution_adds_up_to_the_models_own_logits(model: MuranoModel) -> None:
    prompts = shipped_prompts("facts")[:100]
    parts = logit_attribution(model, prompts)
    own = []
    with torch.no_grad():
        for prompt, ids in zip(prompts, parts.answer_ids.tolist(), strict=True):
            logits = model.hf_model(torch.tensor([model.encode(prompt)])).logits[0, -1]
            own.append([float(logits[i]) if i >= 0 else float("nan") for i in ids])
    sums = parts.contributions.sum(-1)[:, 0]
    torch.testing.assert_close(sums, torch.tensor(own), atol=1e-4, rtol=0, equal_nan=True)
    heads = logit_attribution(model, prompts, by="head")
    names, added = summed(heads)
    assert names == parts.components
    torch.testing.assert_close(added, parts.contributions, atol=1e-4, rtol=0, equal_nan=True)
    assert str(heads.components[int(heads.values().nanmean(0).argmax())]) == "L23.attn_out.h4"

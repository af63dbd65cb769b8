"""A generation of many families: the tokens are transformers' own, and every cell is that of a plain lens of what was written so far."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.reading import fresh, held, own_logits
from support.tiny_models import tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from transformers import GenerationConfig, Phi3Config, Phi3ForCausalLM, WatermarkingConfig

from murano import MuranoModel, follow_generation, logit_lens
from murano.artifacts.generation_lens import GenerationLensResult
from murano.errors import InputError, ReadoutError
from murano.model.rope import turning_lengths

STEPS = 6
PROMPTS = [[20, 31, 42, 53, 64], [20, 31, 42, 53], [77, 66, 55, 44], [99]]
#: Of different kinds: plain, with windows, with alibi, learned positions, capped or scaled logits, experts, recurrent ones, encoders
#: made decoders, blocks that are called twice, streams in parallel.
FAMILIES = (
    *(
        "llama",
        "gpt2",
        "opt",
        "bloom",
        "qwen2",
        "cohere",
        "cohere2",
        "falcon",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gptj",
        "mpt",
    ),
    *(
        "mistral",
        "mixtral",
        "granite",
        "minicpm3",
        "deepseek_v3",
        "llama4_text",
        "mamba",
        "falcon_mamba",
        "recurrent_gemma",
    ),
    *("jamba", "qwen3_next", "rwkv", "openai-gpt", "bert", "big_bird", "dory", "hrm_text", "inkling_text", "lfm2"),
)
WITHOUT_CACHE = {
    "openai-gpt": "its forward takes none",
    "recurrent_gemma": "going on from it changes a logit by",
    "rwkv": "going on from it changes a logit by",
}


def rerun(model: MuranoModel, ids: list[int], steps: int) -> list[int]:
    """Greedy tokens by whole forwards alone."""
    written: list[int] = []
    end = model.hf_model.generation_config.eos_token_id
    while len(written) < steps and (not written or written[-1] != end):
        written.append(int(own_logits(model.hf_model, torch.tensor([ids + written]))[0, -1].argmax()))
    return written


def follow(model: MuranoModel, prompts: Any = PROMPTS, **options: Any) -> GenerationLensResult:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of families without a cache
        return follow_generation(model, prompts, **{"max_new_tokens": STEPS, "top_k": 3, **options})


#: Logits of tiny random models that differ by less are equal but for rounding.
TIE = 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_is_that_of_a_plain_lens(family: str) -> None:
    model = held(family)
    lens = follow(model)
    assert lens.readout["exact"] is True
    assert (lens.cache is None) == (family in WITHOUT_CACHE)
    if family in WITHOUT_CACHE:
        assert WITHOUT_CACHE[family] in lens.notes[0]
        assert "Every step runs all tokens again, which is slower." in lens.notes[0]
    for prompt, ids in enumerate(PROMPTS):
        written = rerun(model, ids, STEPS)
        n = len(written)
        assert lens.sampled_ids[prompt].tolist() == written + [-1] * (lens.sampled_ids.shape[1] - n)
        assert lens.finished[prompt] == (
            "end" if written[-1] == model.hf_model.generation_config.eos_token_id else "length"
        )
        plain = logit_lens(model, [[*ids, *written[:-1]]], positions=range(-n, 0), top_k=3, keep="logits")
        assert plain.logits is not None
        whole = plain.logits[:, 0]
        # The same three, but for numbers that differ in their last bits: which of them is larger depends on the processor.
        mine, theirs = lens.top_ids[:, prompt, :n].long(), plain.top_ids[:, 0].long()
        assert (whole.gather(-1, mine) - whole.gather(-1, theirs)).abs().max() <= TIE
        assert (mine.sort(-1).values.diff(dim=-1) > 0).all()
        torch.testing.assert_close(lens.top_probs[:, prompt, :n], plain.top_probs[:, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(lens.entropy[:, prompt, :n], plain.entropy[:, 0], atol=1e-4, rtol=0)
        # What was written is the model's own first choice, at the last layer and in each row of its own logits.
        own = own_logits(model.hf_model, torch.tensor([[*ids, *written[:-1]]]))[0, -n:].log_softmax(-1)
        taken = own.gather(1, torch.tensor(written).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(lens.own_log_probs[prompt, :n], taken, atol=1e-4, rtol=0)
        torch.testing.assert_close(lens.sampled_log_probs[-1, prompt, :n], taken, atol=1e-4, rtol=0)
        assert lens.sampled_ranks[-1, prompt, :n].tolist() == [0] * n
        # And in every layer: its log-probability and rank by a whole distribution.
        asked = torch.tensor(written).view(1, n, 1).expand(len(lens.addresses), n, 1)
        expected = whole.log_softmax(-1).gather(-1, asked).squeeze(-1)
        torch.testing.assert_close(lens.sampled_log_probs[:, prompt, :n], expected, atol=1e-4, rtol=0)
        ranks, logit = lens.sampled_ranks[:, prompt, :n], whole.gather(-1, asked)
        assert ((whole > logit + TIE).sum(-1) <= ranks).all() and (ranks < (whole >= logit - TIE).sum(-1)).all()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mamba", "bloom", "qwen2", "opt", "falcon"])
@pytest.mark.parametrize("draw", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8}], ids=str)
def test_the_tokens_of_transformers_generate(family: str, draw: dict[str, float]) -> None:
    model = held(family)
    lens = follow(model, max_new_tokens=12, **draw, **({"seed": 11} if draw else {}))
    for prompt, ids in enumerate(PROMPTS):
        torch.manual_seed(11 + prompt)
        options = {"do_sample": True, "top_k": 0, **draw} if draw else {"do_sample": False}
        out = model.hf_model.generate(torch.tensor([ids]), max_new_tokens=12, pad_token_id=0, **options)  # type: ignore[operator]
        written = out[0, len(ids) :].tolist()
        assert lens.sampled_ids[prompt, : len(written)].tolist() == written
        assert not lens.steps_mask[prompt, len(written) :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral"])
def test_in_half_precision(family: str, dtype: torch.dtype) -> None:
    model = fresh(family, dtype)
    lens = follow(model)
    assert lens.cache is not None
    assert lens.model["dtype"] == str(dtype).removeprefix("torch.")
    gap = (lens.sampled_log_probs[-1] - lens.own_log_probs)[lens.steps_mask].abs().max()
    assert gap < 0.05


def test_prompts_do_not_depend_on_each_other() -> None:
    """One that ends early is dropped from its batch, or fed on unread where the cache can't let go of it."""
    for family in ("llama", "mamba", "openai-gpt"):
        model = held(family)
        same = [[20, 31, 42, 53], [77, 66, 55, 44], [50, 60, 70, 80], [90, 91, 92, 93]]
        together = follow(model, same, max_new_tokens=9, temperature=1.0, seed=5)
        first = [int(i) for i in together.sampled_ids[:, 2]]
        # The third token of one ends it; the others go on.
        model.hf_model.generation_config.eos_token_id = first[1]
        try:
            ended = follow(model, same, max_new_tokens=9, temperature=1.0, seed=5)
        finally:
            model.hf_model.generation_config.eos_token_id = 2
        assert ended.finished[1] == "end" and int(ended.steps_mask[1].sum()) <= 3
        for prompt in range(4):
            n = int(ended.steps_mask[prompt].sum())
            assert torch.equal(ended.sampled_ids[prompt, :n], together.sampled_ids[prompt, :n])
            torch.testing.assert_close(
                ended.top_probs[:, prompt, :n], together.top_probs[:, prompt, :n], atol=1e-5, rtol=0
            )
            assert ended.top_ids[:, prompt, n:].unique().tolist() in ([], [-1])
            assert ended.top_probs[:, prompt, n:].isnan().all()
            alone = follow(model, same[prompt : prompt + 1], max_new_tokens=n, temperature=1.0, seed=5 + prompt)
            assert torch.equal(alone.sampled_ids[0], ended.sampled_ids[prompt, :n])


def test_chunks_and_batches_do_not_change_the_numbers() -> None:
    model = held("llama")
    usual = follow(model)
    small = follow(model, max_chunk_bytes=4 * 4 * model.vocab_size, max_batch_tokens=1)
    assert torch.equal(small.sampled_ids, usual.sampled_ids)
    torch.testing.assert_close(small.top_probs, usual.top_probs, atol=1e-6, rtol=0, equal_nan=True)


def test_layers_in_the_users_order() -> None:
    model = held("llama")
    whole = follow(model, layers=["embeddings", *range(3)])
    some = follow(model, layers=[1, "embeddings", "L1.resid_pre", "ln_final"])
    assert [str(a) for a in some.addresses] == ["L1.resid_post", "embeddings", "L1.resid_pre", "ln_final"]
    for mine, theirs in ((0, 2), (1, 0), (2, 1), (3, 3)):
        assert torch.equal(some.top_ids[mine], whole.top_ids[theirs])
        torch.testing.assert_close(some.sampled_log_probs[mine], whole.sampled_log_probs[theirs], atol=1e-5, rtol=0)


def test_the_last_layer_is_checked_though_nobody_asked_for_it() -> None:
    model = fresh("llama")
    assert model.check_readout().exact and model.cache.name
    norm = model.hf_model.get_submodule(model.anatomy.final_norm)
    norm.register_forward_hook(lambda m, a, out: out * 1.01 if out.shape[1] != 1 or out.shape[0] > 1 else out)
    with pytest.raises(ReadoutError, match=r"at L2.resid_post, step \d of prompt \d, the log-probability"):
        follow(model, layers=0)


def test_it_ends_at_a_stop_text_or_says_that_none_came() -> None:
    model = held("gpt2")
    free = follow(model, [PROMPTS[0]], max_new_tokens=8)
    word = free.sampled_words[0][3]
    ended = follow(model, [PROMPTS[0]], max_new_tokens=8, stop=[word, "never"])
    first = free.sampled_words[0].index(word) + 1
    assert ended.finished == ("stop",)
    assert ended.sampled_ids.tolist() == [free.sampled_ids[0, :first].tolist()]
    assert ended.notes == ()
    never = follow(model, PROMPTS[:2], max_new_tokens=8, stop="never to be seen")
    assert never.finished == ("length", "length")
    assert never.notes == ("No stop text of ['never to be seen'] came in the 8 tokens of prompts 0, 1.",)
    assert never.notes[0] in str(never)


def test_a_model_without_a_cache_says_that_it_is_slower() -> None:
    with pytest.warns(
        UserWarning, match=r"OpenAIGPTLMHeadModel can't go on from a cache \(its forward takes none\).*which is slower"
    ):
        lens = follow_generation(held("openai-gpt"), PROMPTS, max_new_tokens=2)
    assert lens.cache is None


def test_what_was_read_before_changes_nothing() -> None:
    """Recurrent Gemma keeps its state in its modules, and a prompt of one token starts from what the last forward left there."""
    model = fresh("recurrent_gemma")
    for prompt in ([99], [20, 31, 42]):
        expected = rerun(model, prompt, STEPS)
        for before in ([[77]], [[20, 31, 42, 53]], [[50], [60], [70]]):
            follow(model, before)
            assert follow(model, [prompt]).sampled_ids[0].tolist() == expected
            follow(model, before)
            assert model.generate([prompt], max_new_tokens=STEPS).ids == [expected]


def test_a_state_that_is_kept_outside_of_the_cache_is_found() -> None:
    """Of a module that adds what it was last given, and starts anew with every prompt of more than one token."""
    model = fresh("llama")
    left: list[torch.Tensor] = []

    def add_the_last(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        shift = left[-1] if left and output.shape[1] == 1 and left[-1].shape == output.shape else 0
        left.append(output[:, -1:].detach())
        return output + shift

    model.hf_model.model.layers[0].mlp.register_forward_hook(add_the_last)
    assert model.cache.name is None
    assert "going on from it changes a logit by" in model.cache.reason


@pytest.fixture(scope="module")
def longrope() -> MuranoModel:
    """Its rope turns from short to long factors beyond 24 tokens."""
    config = Phi3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        original_max_position_embeddings=24,
        pad_token_id=0,
        eos_token_id=299,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]},
    )
    model = Phi3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.3, generator=generator)
    return MuranoModel(model, tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("length", [16, 23, 24, 25, 40])
def test_a_rope_that_turns_as_the_text_grows(longrope: MuranoModel, length: int) -> None:
    """Two prompts share a batch; from the step on that passes 24 tokens the keys in the cache are those of another rope."""
    assert turning_lengths(longrope.config) == (24,)
    drawn = torch.randint(16, 290, (2, length), generator=torch.Generator().manual_seed(length))
    lens = follow(longrope, drawn.tolist(), max_new_tokens=12)
    assert lens.cache is not None and lens.notes == ()
    for prompt, ids in enumerate(drawn.tolist()):
        n = int(lens.steps_mask[prompt].sum())
        written = lens.sampled_ids[prompt, :n].tolist()
        assert written == rerun(longrope, ids, 12)
        out = longrope.hf_model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)  # type: ignore[operator]
        assert written == out[0, length:].tolist()
        assert longrope.generate([ids], max_new_tokens=12).ids == [written]
        for step in range(n):
            plain = logit_lens(longrope, [[*ids, *written[:step]]], positions=[-1], top_k=3)
            torch.testing.assert_close(lens.top_probs[:, prompt, step], plain.top_probs[:, 0, 0], atol=1e-5, rtol=0)


def test_prompts_on_both_sides_of_a_turning_rope_share_no_batch(longrope: MuranoModel) -> None:
    short, long = [20, 31, 42], list(range(20, 50))
    assert longrope.check_readout().pads is False
    together, alone = (logit_lens(longrope, prompts, positions=[-1]) for prompts in ([short, long], [short]))
    assert torch.equal(together.top_ids[:, 0], alone.top_ids[:, 0])
    torch.testing.assert_close(together.top_probs[:, 0], alone.top_probs[:, 0], atol=1e-6, rtol=0)


def test_the_lengths_at_which_ropes_turn() -> None:
    long = {"rope_type": "longrope", "original_max_position_embeddings": 12}
    each = {"full_attention": long, "sliding_attention": {"rope_type": "default"}}
    for parameters, lengths in ((long, (12,)), (each, (12,)), ({"rope_type": "dynamic"}, ()), (None, ()), ({}, ())):
        assert turning_lengths(SimpleNamespace(rope_parameters=parameters)) == lengths
    assert turning_lengths(None) == ()


def test_the_prompts_rows_are_those_of_the_plain_lens() -> None:
    model = held("llama")
    lens = follow(model, include_prompt=True)
    plain = logit_lens(model, PROMPTS, top_k=3)
    assert lens.prompt_lens is not None and follow(model).prompt_lens is None
    assert torch.equal(lens.prompt_lens.top_ids, plain.top_ids)
    assert torch.equal(lens.input_ids, plain.input_ids)
    # The prompt's last row is what the first token is predicted from.
    torch.testing.assert_close(lens.top_probs[:, :, 0], plain.top_probs[:, :, -1], atol=1e-6, rtol=0)


def test_a_seed_is_drawn_from_torch_and_told() -> None:
    model = held("llama")
    torch.manual_seed(3)
    one = follow(model, temperature=1.0)
    torch.manual_seed(3)
    assert torch.equal(one.sampled_ids, follow(model, temperature=1.0).sampled_ids)
    again = follow(model, temperature=1.0, seed=one.settings["seed"])
    assert torch.equal(one.sampled_ids, again.sampled_ids)
    assert follow(model).settings["seed"] is None


def test_in_a_chat_the_end_of_a_turn_ends_it() -> None:
    model = fresh("llama", chat=True)
    tokenizer = model.tokenizer
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ eos_token }}", "{{ unk_token }}")
    from murano.model.ends import end_of_turn, end_tokens

    assert end_of_turn(tokenizer) == tokenizer.unk_token_id
    assert end_tokens(model, chat=True) == {2, tokenizer.unk_token_id}
    assert end_tokens(model, chat=False) == {2}
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert end_of_turn(tokenizer) is None
    assert end_of_turn(tiny_tokenizer()) is None


def test_what_a_checkpoint_asks_of_generate_and_is_not_done_is_said() -> None:
    model = fresh("llama")
    for name, value in {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 2,
        "encoder_repetition_penalty": 1.2,
        "min_length": 5,
        "min_new_tokens": 3,
        "suppress_tokens": list(range(20, 120)),
        "begin_suppress_tokens": [20],
        "bad_words_ids": [[21]],
        "sequence_bias": [[[22], 1.0]],
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "guidance_scale": 1.5,
        "exponential_decay_length_penalty": (3, 1.1),
        "watermarking_config": WatermarkingConfig(),
        "num_beams": 4,
        "max_time": 2.0,
        "stop_strings": ["x"],
        "token_healing": True,
    }.items():
        model.hf_model.generation_config = GenerationConfig(eos_token_id=2, **{name: value})
        (note,) = follow(model, max_new_tokens=2).notes
        assert note.startswith(f"The checkpoint asks generate for {name}=")
        assert note.endswith("; the tokens here are the model's own choice without it.")
        assert "\n" not in note and len(note) < 200
    model.hf_model.generation_config = GenerationConfig(eos_token_id=2, repetition_penalty=1.1, min_new_tokens=3)
    assert follow(model, max_new_tokens=2).notes == (
        "The checkpoint asks generate for min_new_tokens=3, repetition_penalty=1.1; "
        "the tokens here are the model's own choice without it.",
    )


def test_what_a_checkpoint_asks_of_draws_is_said_of_draws() -> None:
    model = fresh("llama")
    for name, value in {
        "top_k": 20,
        "min_p": 0.1,
        "typical_p": 0.9,
        "epsilon_cutoff": 0.1,
        "eta_cutoff": 0.1,
        "top_h": 0.5,
    }.items():
        model.hf_model.generation_config = GenerationConfig(eos_token_id=2, do_sample=True, **{name: value})
        assert follow(model, max_new_tokens=2).notes == ()
        (note,) = follow(model, max_new_tokens=2, temperature=1.0).notes
        assert note.startswith(f"The checkpoint asks generate for {name}={value};")


def test_what_a_checkpoint_sets_and_changes_no_token_is_not_said() -> None:
    model = fresh("llama")
    config = GenerationConfig(eos_token_id=2, do_sample=True, temperature=0.6, top_p=0.9, top_k=50)
    config.update(guidance_scale=1.0, min_p=0.0, min_new_tokens=0, bad_words_ids=[], max_length=99, chat_format="x")
    model.hf_model.generation_config = config
    for temperature in (0.0, 1.0):
        assert follow(model, max_new_tokens=2, temperature=temperature).notes == ()
    model.hf_model.generation_config = None
    assert follow(model, max_new_tokens=2).notes == ()


@pytest.fixture(scope="module")
def model() -> MuranoModel:
    return MuranoModel(tiny_model("gpt2"), tokenizer=tiny_tokenizer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: it must be a whole number from 1 upwards."),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0"),
        ({"temperature": -1}, "temperature=-1: it must be a number from 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0, "temperature": 1}, "top_p=0: it must be a probability above 0"),
        ({"top_p": 0.9}, "top_p=0.9 draws nothing at temperature 0"),
        ({"seed": -1}, "seed=-1: it must be a whole number from 0"),
        ({"seed": 3}, "seed=3 draws nothing at temperature 0: give a temperature above 0 too, or no seed."),
        ({"stop": ""}, "stop='': it must be a text"),
        ({"stop": [3]}, "stop=[3]"),
        ({"layers": 99}, "Layer 99 is outside the model"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_bad_input(model: MuranoModel, options: dict[str, Any], message: str) -> None:
    from murano.steps import FollowGeneration

    for call in (lambda **o: follow_generation(model, PROMPTS, **o), lambda **o: FollowGeneration(model, **o)):
        with pytest.raises(InputError) as caught:
            call(**{"max_new_tokens": 4, **options})
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_prompt_that_leaves_no_room_says_how_much_is_left(model: MuranoModel) -> None:
    for length, left, advice in ((158, 2, "use max_new_tokens=2"), (160, 0, "use a shorter prompt")):
        with pytest.raises(InputError) as caught:
            follow_generation(model, [[20], [20] * length], max_new_tokens=4)
        assert f"Prompt 1 has {length} tokens and the model's context is 160: {left} are left" in str(caught.value)
        assert advice in str(caught.value)
    assert follow(model, [[20] * 158], max_new_tokens=2).sampled_ids.shape[1] <= 2

"""Packed lengths in transformers' words: those of another part of the model, of one side alone, or of no order."""

from __future__ import annotations

import types

import pytest
import torch

from flashattn_lite.integrations import packing
from flashattn_lite.integrations import transformers as ours

X = torch.randn(1, 2, 9, 16)
MASK = torch.zeros(1, 1, 9, 9)
CU = torch.tensor([0, 4, 9])


def forward(cu_q, cu_k, mask=None, x=X, keys=None):
    keys = x if keys is None else keys
    return ours.attention_forward(torch.nn.Module(), x, keys, keys, mask, cu_seq_lens_q=cu_q, cu_seq_lens_k=cu_k)[0]


@pytest.mark.parametrize("mask", [None, MASK, MASK == 0], ids=["no mask", "float", "bool"])
@pytest.mark.parametrize("wrong", [[0, 5, 24], [0, 8], [1, 9], [0, 5, 3, 9], []], ids=str)
def test_lengths_that_are_not_these_queries_are_refused(wrong, mask):
    """A tower of images is handed those of the text, and would cut the image at them."""
    with pytest.raises(
        ValueError, match=r"^cu_seq_lens_q: must ascend from 0 to the length of what is att.* \(9\); got"
    ) as told:
        forward(torch.tensor(wrong, dtype=torch.int32), CU, mask)
    assert '"vision_config": "sdpa"' in str(told.value)


def test_keys_may_have_room_for_more_beside_a_mask_or_a_cache_alone():
    longer, shorter = torch.randn(1, 2, 12, 16), torch.tensor([0, 4, 8])
    for mask in (torch.zeros(1, 1, 9, 12), None):
        forward(CU, CU, mask, keys=longer)
        with pytest.raises(ValueError, match=r"^cu_seq_lens_k: must ascend"):
            forward(CU, torch.tensor([0, 4, 13]), mask, keys=longer)
    forward(CU, shorter, MASK)
    with pytest.raises(ValueError, match=r"^cu_seq_lens_k: must ascend"):
        forward(CU, shorter)


@pytest.mark.parametrize("mask", [None, MASK])
def test_one_side_alone_is_refused(mask):
    with pytest.raises(ValueError, match=r"^cu_seq_lens_k: must come with cu_seq_lens_q; got None"):
        forward(CU, None, mask)
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: must come with cu_seq_lens_k; got None"):
        forward(None, CU, mask)


@pytest.mark.parametrize(("name", "remedy"), [("indices", "position_ids that start"), ("block_indices", "Pad the")])
@pytest.mark.parametrize("mask", [None, MASK, MASK == 0], ids=["no mask", "float", "bool"])
def test_keys_chosen_as_if_all_were_one_sequence_are_refused(name, remedy, mask):
    """An indexer is not told of the lengths: what is left of its choice was half of what a sequence alone gives.

    What chose keys may have gone by a mask that keeps the sequences apart, what chose blocks not.
    """
    module, one = torch.nn.Module(), torch.tensor([0, 9])
    module.indexer = types.SimpleNamespace(block_size=9)
    chosen = {name: torch.zeros((1, 9, 2) if name == "indices" else (1, 1, 9, 1), dtype=torch.int64)}
    call = lambda mask, cu: ours.attention_forward(module, X, X, X, mask, cu_seq_lens_q=cu, cu_seq_lens_k=cu, **chosen)
    call(mask, one)
    apart = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool()[None, None]
    wrong = [mask, apart.index_fill(3, torch.tensor(3), True)]
    if name == "indices":
        call(apart, CU)
    else:
        wrong.append(apart)
    for given in wrong:
        with pytest.raises(NotImplementedError, match=rf"^{name}: keys that an indexer chose must not .* {remedy}"):
            call(given, CU)


def test_lengths_of_two_dims_are_refused():
    with pytest.raises(
        ValueError, match=r"^cu_seq_lens_q: must be \(sequences \+ 1,\); got a tensor of shape \(1, 3\)"
    ):
        forward(CU[None], CU, MASK)


def test_they_are_read_once_for_all_layers_and_anew_when_they_change(monkeypatch):
    cu, reads, tolist = CU.clone(), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x) or tolist(x))
    for _ in range(3):
        assert packing.numbers_of(cu) == [0, 4, 9]
    assert len(reads) == 1
    cu[1] = 5
    assert packing.numbers_of(cu) == [0, 5, 9] and len(reads) == 2
    with torch.inference_mode():  # these tell nobody when they change
        cu = CU.clone()
        assert packing.numbers_of(cu) == [0, 4, 9]
        cu[1] = 6
        assert packing.numbers_of(cu) == [0, 6, 9]


def test_compiled_code_takes_them_without_reading():
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(CU, CU), forward(CU, CU))
    torch.testing.assert_close(compiled(CU, CU, MASK), forward(CU, CU, MASK))


def test_a_given_mask_that_the_model_rewrites_is_refused():
    """Transformers hands it on without asking for one, where a model would have been refused."""
    module = torch.nn.Module()
    module.config = type("Config", (), {"model_type": "deepseek_v4"})()
    with pytest.raises(NotImplementedError, match=r"^config: its model must take torch's attention"):
        ours.attention_forward(module, X, X, X, MASK == 0)
    ours.attention_forward(module, X, X, X, MASK)


@pytest.mark.parametrize("tower", ["pixtral", "clip_vision_model"])
def test_a_text_packed_beside_images(tower):
    """The tower has lengths of its own: refused, and as the error says it is right. transformers 5.17 hands it none."""
    transformers = pytest.importorskip("transformers", minversion="5.18")
    ours.register()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = {"model_type": tower, "image_size": 32, "patch_size": 8, **sizes}
    text = {"model_type": "llama", "vocab_size": 128, **sizes}
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=100,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    images = 16 if tower == "pixtral" else 17
    ids, ends = torch.randint(0, 90, (1, images + 12)), (8, images + 12)
    ids[:, 9 : 9 + images] = 100  # in the second sequence
    given = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32), "use_cache": False}
    given |= {"image_sizes": torch.tensor([[32, 32]])} if tower == "pixtral" else {}
    cu = torch.tensor([0, *ends], dtype=torch.int32)
    positions = torch.cat([torch.arange(8), torch.arange(images + 4)])[None]
    packed = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "position_ids": positions}
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation="attn_lite").eval()
    with torch.no_grad(), pytest.raises(ValueError, match=r"^cu_seq_lens_q: must ascend .*vision_config"):
        model(**given, **packed)
    model.set_attn_implementation({"text_config": "attn_lite", "vision_config": "sdpa"})
    with torch.no_grad():
        found = model(**given, **packed).logits
        model.set_attn_implementation("sdpa")
        want = model(**given, position_ids=positions).logits
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)

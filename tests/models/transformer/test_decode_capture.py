"""A captured step, replayed, does what a step does: it has nothing of the host in it but what never changes.

There is no CUDA here, so a stand-in records the step's tensor operations, with the addresses and the numbers they were given,
and runs them again, as a CUDA graph does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.transformer import model as model_module
from models.transformer.decoder import Decoder
from models.transformer.generation import generate
from models.transformer.model import Transformer
from models.transformer.sampling import Sampling
from tests.models.transformer.small import GPT2, LLAMA

PROMPTS = [[3, 14, 15, 9], [8], [30, 1, 2]]
STEPS = 12
ASKS_THE_DEVICE = ("_local_scalar_dense", "is_nonzero", "nonzero", "item", "equal")


class Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)  # later calls find it where they found it first


@contextmanager
def recording(graph: Recorded, **_: object) -> Iterator[None]:
    with graph:
        yield


@pytest.fixture
def no_cuda_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    # As on a device: what is outside is marked, and nobody is asked.
    as_on_a_device = lambda values, limit, *_: (values < 0) | (values >= limit)  # noqa: E731
    monkeypatch.setattr(model_module, "outside", as_on_a_device)
    monkeypatch.setattr("models.parallel.embedding.outside", as_on_a_device)


@pytest.mark.usefixtures("no_cuda_needed")
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    ("options", "stop"),
    [({}, None), ({}, 7), ({"temperature": 1.0}, None), ({"temperature": 1.3, "top_k": 9, "top_p": 0.8, "seed": 2}, 5)],
)
def test_replays_give_what_steps_give(config, options, stop):
    model = Transformer(config)
    model.initialize(3)
    want = Decoder(model, PROMPTS, STEPS, Sampling(**options), stop, static=False)
    want.prefill()
    for _ in range(STEPS - 1):
        want.step()
    decoder = Decoder(model, PROMPTS, STEPS, Sampling(**options), stop, static=True)
    decoder.prefill()
    first = decoder.generated.clone()
    replay = decoder.capture()
    assert torch.equal(decoder.generated, first), "capturing leaves no trace"
    for _ in range(STEPS - 1):
        replay()
    assert torch.equal(decoder.generated, want.generated)
    assert torch.equal(decoder.finished, want.finished)
    assert decoder.count.tolist() == [STEPS]
    assert decoder.cache.lengths.tolist() == [len(prompt) + STEPS - 1 for prompt in PROMPTS]
    called = {func.__name__.split(".")[0] for func, *_ in replay.__self__.calls}
    assert not called & set(ASKS_THE_DEVICE)
    if not options and stop is None:
        assert decoder.generated.tolist() == generate(model, PROMPTS, max_new_tokens=STEPS).tokens


@pytest.mark.usefixtures("no_cuda_needed")
def test_nan_is_noticed_in_a_replay():
    model = Transformer(LLAMA)
    model.initialize(3)
    decoder = Decoder(model, PROMPTS, STEPS, Sampling(), None, static=True)
    decoder.prefill()
    replay = decoder.capture()
    replay()
    assert not decoder.not_finite
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    replay()
    assert decoder.not_finite

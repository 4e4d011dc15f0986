"""Drafters beside a plan in vLLM's engine on a CPU: models that are made for them, and an engine with each."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, KeysView, Sequence
from copy import deepcopy
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from vllm_engine import BUDGET, DECODE_BOUND, PAGES, make_engine

from sparsekv.bench.vllm_engines import by_look_up
from sparsekv.runtime.hf.load import LoadedModel

Prompts = dict[int, list[int]]
Drafters = dict[str, dict[str, Any]]
NGRAM = by_look_up(3)
MTP = {"method": "mtp", "num_speculative_tokens": 2}
# Prompts are cut alike whatever is beside them, and pages suffice for all requests: what is computed again after a
# preemption is prefill.
ALIKE = {"max_num_batched_tokens": 8 * (BUDGET + 4), "long_prefill_token_threshold": BUDGET}
ALIKE |= {"num_gpu_blocks_override": 3 * PAGES}


def engine(folder: str, options: dict[str, Any], **settings: Any) -> Any:
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM 0.32 looks through all modules, and fails at this one
    try:
        settings = {"enable_prefix_caching": False} | settings
        llm = make_engine(folder, additional_config={"sparsekv": options}, **settings)
        count_drafts(llm)
        return llm
    finally:
        if hidden is not None:
            sys.modules["llvmlite.binding.ffi"] = hidden


def by_size(drafter: dict[str, Any]) -> dict[str, Any]:
    """A drafter that drafts fewer tokens for more requests; by suffixes vLLM 0.32 asks for as many always."""
    if drafter["method"] == "suffix":
        return drafter
    sizes = [(1, 3, drafter["num_speculative_tokens"]), (4, 8, 1)]
    return drafter | {"num_speculative_tokens_per_batch_size": sizes}


def accepted(llm: Any, count: str = "accepted_tokens") -> int:
    """Tokens of drafts; "draft_tokens" with the rejected ones. vLLM's own metric counts for the engine that was made
    last."""
    return llm.llm_engine.engine_core.engine_core.scheduler.drafts[f"num_{count}"]


def count_drafts(llm: Any) -> None:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.drafts, given = Counter(), scheduler.make_spec_decoding_stats

    def counted(*args: Any, **kwargs: Any) -> Any:
        scheduler.drafts.update({name: kwargs[name] for name in ("num_draft_tokens", "num_accepted_tokens")})
        return given(*args, **kwargs)

    scheduler.make_spec_decoding_stats = counted


class Suffixes:
    """Drafts what followed the longest suffix of a request when it was there before, as long as that at most: in place
    of arctic-inference, which vLLM asks in this form and which is built from source."""

    cached_requests: frozenset[str] = frozenset()

    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        self._most, self._tokens = max_tree_depth, dict[str, list[int]]()
        self.stop_request = self._tokens.pop

    @property
    def active_requests(self) -> KeysView[str]:
        return self._tokens.keys()

    def start_request(self, request: str, prompt: Sequence[int]) -> None:
        self._tokens[request] = [*map(int, prompt)]

    def add_active_response(self, request: str, tokens: Sequence[int]) -> None:
        self._tokens[request] += tokens

    def speculate(self, request: str, context: Any, max_spec_tokens: int, **asked: float) -> Any:
        tokens = self._tokens[request]
        assert tokens[-len(context) :] == context.tolist()
        for size in range(min(self._most, len(context)), 0, -1):
            for at in range(len(tokens) - size - 1, -1, -1):
                if tokens[at : at + size] == tokens[-size:]:
                    return SimpleNamespace(token_ids=tokens[at + size :][: min(size, max_spec_tokens)])
        return SimpleNamespace(token_ids=[])


@pytest.fixture(scope="session")
def suffixes() -> None:
    """What drafts by suffixes, where it is not installed."""
    if find_spec("arctic_inference") is None:
        for name in ("arctic_inference", "arctic_inference.suffix_decoding"):
            sys.modules[name] = module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            vars(module)["SuffixDecodingCache"] = Suffixes


@pytest.fixture(scope="session")
def repeated(prompts: Prompts) -> list[list[int]]:
    """Prompts of mixed lengths that repeat themselves, so that drafts are accepted; two grow into another bucket."""
    return [(prompts[200] * 12)[:length] for length in (1600, 300, 1525, 90, DECODE_BOUND - 11)]


@pytest.fixture(scope="session")
def retriever(reference: LoadedModel) -> str:
    """The model of the plan."""
    return str(reference.model.name_or_path)


@pytest.fixture(scope="session")
def eagle3(reference: LoadedModel, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random drafter of one layer, which vLLM numbers behind the model's own; it knows sixteen tokens of a prompt."""
    config, folder = deepcopy(reference.model.config), tmp_path_factory.mktemp("eagle3")
    config.num_hidden_layers, config.architectures, config.tie_word_embeddings = 1, ["LlamaForCausalLM"], False
    known = sorted(set(prompts[200]), key=prompts[200].count)[-16:]
    torch.manual_seed(0)
    layer = AutoModelForCausalLM.from_config(config, dtype=torch.float32).model.layers[0]
    weights = {f"midlayer.{name}": weight for name, weight in layer.state_dict().items()}
    size = config.hidden_size
    for name in ("q", "k", "v"):  # of a token's embedding and the model's hidden states
        weight = weights[f"midlayer.self_attn.{name}_proj.weight"]
        weights[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat((weight, weight), 1)
    weights |= {name: torch.ones(size) for name in ("midlayer.hidden_norm.weight", "norm.weight")}
    weights["fc.weight"] = torch.randn(size, 3 * size) / size**0.5
    weights["lm_head.weight"] = torch.randn(len(known), size)
    weights["d2t"] = torch.tensor(known) - torch.arange(len(known))
    config.draft_vocab_size = len(known)
    config.save_pretrained(folder)
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="session")
def mimo(reference: LoadedModel, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model as MiMo, with biases of 0 and a layer of multi-token prediction (MTP), which vLLM numbers behind the
    model's own. The layer drafts what follows the last token in a prompt: its attention and MLP add nothing to that."""
    config, weights = deepcopy(reference.model.config), reference.model.state_dict()
    config.architectures, config.num_nextn_predict_layers = ["MiMoForCausalLM"], 1
    embedded_TD = weights["model.embed_tokens.weight"][prompts[200]]
    last_TD = torch.nn.functional.rms_norm(embedded_TD[:-1], embedded_TD.shape[1:], eps=config.rms_norm_eps)
    next_DD = torch.linalg.lstsq(last_TD, embedded_TD[1:], driver="gelsd").solution.T
    for name, x in tuple(weights.items()):
        if ".layers.0." in name:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            weights[name.replace("layers.0.", "mtp_layers.0.")] = torch.zeros_like(x) if adds else x
    for name, x in tuple(weights.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name.replace("weight", "bias")] = torch.zeros(len(x))
    for norm in ("token", "hidden", "final"):
        weights[f"model.mtp_layers.0.{norm}_layernorm.weight"] = torch.ones(len(next_DD))
    weights["model.mtp_layers.0.input_proj.weight"] = torch.cat((torch.zeros_like(next_DD), next_DD), 1)
    folder = tmp_path_factory.mktemp("mimo")
    config.save_pretrained(folder)
    reference.model.generation_config.save_pretrained(folder)  # which has the tokens that end an answer
    reference.tokenizer.save_pretrained(folder)
    save_file({name: x.clone() for name, x in weights.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="session")
def drafters(retriever: str, eagle3: str, suffixes: None) -> Drafters:
    """Drafters by name. The draft model is the model itself, each of whose layers has the name and the shape of one of
    the plan's."""
    return {
        "ngram": NGRAM,
        "suffix": {"method": "suffix", "num_speculative_tokens": 3},
        "draft_model": {"method": "draft_model", "model": retriever, "num_speculative_tokens": 3},
        "eagle3": {"method": "eagle3", "model": eagle3, "num_speculative_tokens": 3},
        "mtp": MTP,
    }


@pytest.fixture(scope="session")
def without(retriever: str, plan_file: Path, kept_engines: list[Any]) -> Any:
    """An engine with the plan and no drafter."""
    kept_engines.append(engine(retriever, {"plan": str(plan_file)}, **ALIKE))
    return kept_engines[-1]


@pytest.fixture(scope="session")
def beside(
    retriever: str, mimo: str, drafters: Drafters, plan_file: Path, kept_engines: list[Any]
) -> Callable[[str], Any]:
    """The engine with the plan and a drafter, which drafts fewer tokens for more requests."""
    made: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in made:
            drafter, model = by_size(drafters[name]), mimo if name == "mtp" else retriever
            made[name] = engine(model, {"plan": str(plan_file)}, speculative_config=drafter, **ALIKE)
            kept_engines.append(made[name])
        return made[name]

    return of

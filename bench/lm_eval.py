"""A model with a plan under lm-evaluation-harness 0.4.13 (the extra `[lm-eval]`).

    python -m sparsekv.bench.lm_eval --model sparsekv --model_args pretrained=MODEL,plan=plan.yaml \\
        --tasks niah_single_1 --metadata '{"max_seq_lengths": [32768]}'

All options are the harness's own. It looks for no models of other packages, so this command names ours to it first.
"""

from __future__ import annotations

from typing import Any

import torch

from sparsekv.bench.suite import generated
from sparsekv.planner.evaluation.batches import step_of
from sparsekv.planner.evaluation.predictions import after_prompt, prefill
from sparsekv.plans.errors import UnsupportedError, UsageError, install_command
from sparsekv.plans.files import load_plan
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.load import load_model

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as error:
    raise UsageError(
        f"expected lm-evaluation-harness, found no {error.name}; install it: {install_command('lm-eval')}"
    ) from error

_MOST_NEW = 256  # tokens, where a task does not say


@register_model("sparsekv")
class PlannedLM(TemplateLM):
    """Answers by a plan, or dense, one prompt at a time.

    Args:
        pretrained: an alias, hub id, folder or GGUF file.
        plan: a plan file; "none" is dense.
        device: a torch device; the first GPU or the CPU by default.
        prefill_chunk: tokens of a prompt fed at once; by default as the plan was verified, or would be.
    """

    def __init__(
        self,
        pretrained: str,
        plan: str = "none",
        device: str | None = None,
        dtype: str = "auto",
        prefill_chunk: int | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if str(batch_size or 1) != "1" or max_batch_size not in (None, 1):
            raise UsageError(f"expected batch_size 1, found {batch_size}; prompts run one at a time")
        self.loaded = load_model(pretrained, device=device or "auto", dtype=dtype)
        self.tokenizer = self.loaded.tokenizer
        self._is_dense = plan == "none"
        self._chunk = prefill_chunk
        if not self._is_dense:
            found = load_plan(plan)
            self._chunk = step_of(found, prefill_chunk or (found.quality.step if found.quality else None))
            self.handle = apply(self.loaded.model, found, info=self.loaded.info, sparse="always")

    @property
    def eot_token_id(self) -> int:
        end: int = self.tokenizer.eos_token_id
        return end

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; special ones as the tokenizer puts them by default."""
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer(string, **options)["input_ids"]
        return ids

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        return [self._loglikelihood(context, continuation) for _, context, continuation in requests]

    def _loglikelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Log-probability of the continuation, fed as decode steps where a plan runs, and whether it is greedy."""
        answer_BA = self._tensor(continuation)
        prompts = prefill(self.loaded.model, self._prompt(context, len(continuation)), self._chunk)
        logits_BAV = after_prompt(self.loaded.model, prompts, answer_BA, stepwise=not self._is_dense)[:, :-1]
        log_BA = logits_BAV.log_softmax(-1).gather(-1, answer_BA[..., None])
        return float(log_BA.double().sum()), bool((logits_BAV.argmax(-1) == answer_BA).all())

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Raises: whole texts are not scored."""
        raise UnsupportedError("expected tasks of generate_until or loglikelihood, found one of loglikelihood_rolling")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, cut at a task's stop strings."""
        return [self._answer(*request.args) for request in requests]

    def _answer(self, context: str, options: dict[str, Any]) -> str:
        if options.get("do_sample") and options.get("temperature"):
            raise UnsupportedError("expected a task with greedy answers, found do_sample; set temperature to 0")
        tokens = int(options.get("max_gen_toks", _MOST_NEW))
        stops = options.get("until") or []
        (text,) = generated(self.loaded, self._prompt(self.tok_encode(context), tokens), tokens, self._chunk)
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.split(stop)[0]
        return text

    def _prompt(self, ids: list[int], tokens: int) -> torch.Tensor:
        """[1, S]: the end of a prompt that leaves room for so many tokens, as the harness cuts."""
        room = self.loaded.info.context_length - tokens
        if room <= 0:
            raise UsageError(f"expected fewer new tokens than the context of {room + tokens}, found {tokens}")
        return self._tensor(ids[-room:])

    def _tensor(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([ids], device=self.loaded.model.device)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

"""The speculator of exact output in vLLM (docs/exact.md), model runner V2: the plan's decode steps draft by the target
model itself, into the slots that the verification overwrites.

A request whose newest token has position p has the keys and values of all tokens before it, from passes that attended
to everything. The steps of a draft write those of p, p + 1, ... behind them, in slots that vLLM reserves for a draft
model; the verification of the next step computes the same positions again, and writes them before it attends.

Shapes: B requests of a step, T their rows, K drafted tokens, padding included where a graph has it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer, init_attn_backend
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.vllm.attention_backend import SparseBuilder
from sparsekv.runtime.vllm.internals import changed_calls, worker_class

_Worker: Any = worker_class()


class ExactWorker(_Worker):
    """vLLM's own worker, whose model runner drafts by the plan."""

    def init_device(self) -> None:
        super().init_device()
        if not self.vllm_config.use_v2_model_runner:
            raise UnsupportedError(
                "expected model runner V2 for exact output, found V1; unset VLLM_USE_V2_MODEL_RUNNER, and see the line "
                "of vLLM's log that says why it was chosen"
            )
        if changed := list(changed_calls(SelfSpeculator)):
            raise UnsupportedError(f"expected a vLLM that calls {', '.join(changed)} for exact output, found another")
        speculator = SelfSpeculator(self.vllm_config, self.device)
        speculator.runner, self.model_runner.speculator = self.model_runner, speculator


class SelfSpeculator(DraftModelSpeculator):
    """Drafts by the target model, whose layers attend as the plan says in these steps alone: by metadata of their own.

    It has no layers of its own, so that nothing is a draft's layer to vLLM, and nothing else is cached. Drafts are the
    likeliest tokens: to vLLM's rejection sampler a distribution of one point, which keeps that of the target.
    """

    runner: Any  # of the target

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._graphs: Any = None
        self._starts = torch.arange(self.max_num_reqs + 1, dtype=torch.int32, device=device)

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        return target_model

    def set_attn(
        self, model_state: Any, kv_cache_config: Any, block_tables: Any, target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:  # fmt: skip
        """Makes metadata builders of its own for all layers of the target, for steps that draft."""
        self.model_state, self.kv_cache_config, self.block_tables = model_state, kv_cache_config, block_tables
        self.attn_groups, *_ = init_attn_backend(kv_cache_config, self.vllm_config, self.device)
        builders = [one for groups in self.attn_groups for group in groups for one in group.metadata_builders]
        ours = [one for one in builders if isinstance(one, SparseBuilder)]
        if not ours:
            raise UnsupportedError(
                "expected attention by our backend for exact output, found another, which drafts nothing sparse; add "
                "--attention-backend FLASH_ATTN"
            )
        for builder in ours:
            builder.drafts = True

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        self._graphs = SpeculatorCudaGraphManager(self.vllm_config, self.device, mode, decode_query_len=1)

    def capture(self) -> None:
        self.idx_mapping.zero_()
        self._graphs.capture(
            self._step, self.model_state, self.input_buffers, self.block_tables, self.attn_groups,
            self.kv_cache_config, progress_bar_desc="Capturing draft CUDA graphs",
        )  # fmt: skip

    @torch.inference_mode()
    def propose(
        self, input_batch: Any, attn_metadata: Any, slot_mappings: Any, last_hidden_states: Any, aux_hidden_states: Any,
        num_sampled: torch.Tensor, num_rejected: torch.Tensor, last_sampled: torch.Tensor, next_prefill_tokens: Any,
        temperature: Any, seeds: Any, dp_sync_state: Any = None, dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False, mm_inputs: Any = None, is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Drafts behind the tokens that a step has sampled.

        Args:
            num_sampled: [B], 0 for prompts that are not complete: these do not draft.
            num_rejected: [B], rows of the step whose tokens do not count.
            last_sampled: the newest token of each request that the worker knows, [requests, 1].
            dummy_run: nothing is asked for: less memory is taken than by the target's own step of that size.
            num_speculative_tokens: K; None takes the most.

        Returns:
            [B, most]: of which the first K are drafts.
        """
        rows = input_batch.num_reqs
        drafted = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        drafts_BK = self.draft_tokens[:rows]
        if dummy_run or not drafted:
            return drafts_BK.fill_(-1)
        self._begin(input_batch, num_sampled, num_rejected, last_sampled)
        lengths = _lengths(input_batch, drafted)
        longest = int(input_batch.seq_lens_cpu_upper_bound[:rows].max())
        self.draft_max_seq_len = min(longest + drafted, self.max_model_len)
        shape = self._graphs.dispatch(rows, rows, 1, 0)
        connector = self.runner.kv_connector
        connector.set_disabled(True)  # whose hooks in layers would load and save once more for each step of a draft
        for number in range(drafted):
            slots_by_layer, attention = self._prepare(rows, shape, lengths, number)
            if shape.cg_mode == CUDAGraphMode.FULL:
                self._graphs.run_fullgraph(shape)
            else:
                self._step(rows, shape.num_tokens, attention, slots_by_layer)
            drafts_BK[:, number] = self.input_buffers.input_ids[:rows]
        connector.set_disabled(False)
        return drafts_BK

    def _begin(
        self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, last_sampled: Any
    ) -> None:
        rows, buffers = input_batch.num_reqs, self.input_buffers
        cached_B = input_batch.seq_lens[:rows] - num_rejected  # the position of the newest token
        drafts_B = num_sampled > 0
        self.idx_mapping.fill_(-1)  # rows that own no slots
        self.idx_mapping[:rows] = torch.where(drafts_B, input_batch.idx_mapping, -1)
        buffers.input_ids[:rows] = last_sampled[input_batch.idx_mapping, 0]
        buffers.positions[:rows] = cached_B.clamp(max=self.max_model_len - 1)
        buffers.seq_lens.zero_()
        buffers.seq_lens[:rows] = (cached_B + 1).clamp(max=self.max_model_len) * drafts_B
        torch.clamp(self._starts, max=rows, out=buffers.query_start_loc)

    def _prepare(self, rows: int, shape: Any, lengths: Any, number: int) -> tuple[Any, Any]:
        """Returns the slots that a step writes, and its metadata, of which graphs read what lies at fixed addresses."""
        buffers = self.input_buffers
        slots = self.block_tables.compute_slot_mappings(
            self.idx_mapping[:rows], buffers.query_start_loc[: rows + 1], buffers.positions[:rows], shape.num_tokens
        )
        attention = self._build_uniform_attn_metadata(
            batch_desc=shape, num_reqs=rows, num_query_per_req=1, seq_lens_cpu_upper_bound=lengths, step=number + 1
        )
        return build_slot_mappings_by_layer(slots, self.kv_cache_config), attention

    def _step(
        self, num_reqs: int, num_tokens: int, attn_metadata: Any, slot_mappings: Any, num_tokens_across_dp: Any = None,
        cudagraph_runtime_mode: Any = CUDAGraphMode.NONE, num_speculative_steps: int = 0,
    ) -> None:  # fmt: skip
        """Runs the newest token of each row, and puts the likeliest one behind it in its place."""
        buffers = self.input_buffers
        with set_forward_context(
            attn_metadata, self.vllm_config, num_tokens=num_tokens, cudagraph_runtime_mode=cudagraph_runtime_mode,
            num_tokens_across_dp=num_tokens_across_dp, slot_mapping=slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
        ):  # fmt: skip
            hidden_TD = self.model(
                input_ids=buffers.input_ids[:num_tokens], positions=buffers.positions[:num_tokens],
                intermediate_tensors=None, inputs_embeds=None,
            )  # fmt: skip
        buffers.input_ids[:num_reqs] = self.model.compute_logits(hidden_TD[:num_reqs]).argmax(-1)
        buffers.positions[:num_reqs].add_(1).clamp_(max=self.max_model_len - 1)
        lengths_B = buffers.seq_lens[:num_reqs]
        lengths_B.add_(lengths_B > 0).clamp_(max=self.max_model_len)


def _lengths(input_batch: Any, drafted: int) -> torch.Tensor:
    """The most tokens that each request has, as far as the host knows; none in all steps of the draft for prompts that
    are not complete: these neither choose nor count."""
    lengths_B = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs]
    complete_B = lengths_B >= torch.from_numpy(input_batch.prefill_len_np)
    return torch.where(complete_B, lengths_B, -drafted)

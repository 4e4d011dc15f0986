"""Decode as an engine launches it, compiled for Hopper up to the launch itself; that needs no GPU."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
from unittest import mock
import torch
from kernel_resources import compiling_for
from plans_samples import model_info
from tiny_plans import segment
from sparsekv.kernels.decode import radix
from sparsekv.kernels.pages import copy_pages
from sparsekv.plans.phases import DecodeBucket, DecodePlan
from sparsekv.runtime.core import segments, select
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.paged.step_rows import DecodeHost

HEADS, GROUPS, SIZE, ROWS, LONGEST = 4, 2, 64, 16, 640
both = (segment(0, (1,), 40), segment(2, (2, 3), 40, heads="per_kv_head"), segment(4, (5,), 40))
plan = DecodePlan(lengths=(DecodeBucket(up_to=90, dense=True), DecodeBucket(up_to=None, segments=both)))
program = Program.of(None, plan, model_info(layers=6, heads=HEADS, kv_heads=GROUPS))
host = DecodeHost(program, "triton", ROWS, LONGEST, torch.device("cpu"))
cache = torch.zeros(2, 900, 1, GROUPS, SIZE, dtype=torch.bfloat16)
pages = tuple(x_NSGD.transpose(1, 2) for x_NSGD in cache)

def choose(scores_gT, scoring, lengths_B, counts_B, backend, **named):
    return radix.choose(scores_gT, scoring.starts_B, lengths_B, counts_B, **named)

def copy(table_P):
    k_GKD, v_GKD = torch.zeros(2, GROUPS, len(table_P), SIZE, dtype=torch.bfloat16)
    copy_pages(pages, table_P, (k_GKD, v_GKD))

with (
    compiling_for(90) as built,
    mock.patch.object(segments.Budgets, "of", lambda self, lengths_B, backend: self.by_kernel(lengths_B)),
    mock.patch.object(select, "choose", choose),
):
    host.warm_up(program.layers, pages, LONGEST)
    copy(torch.zeros(1, dtype=torch.int32))
    known = {id(kernel) for _, kernel in built}
    print(*sorted({name for name, _ in built}))
    for rows in range(1, ROWS + 1):
        for width in (331, 640):  # of a table of all requests of a step, of which the first ones are prompts
            table_BP = torch.zeros(rows + 3, width, dtype=torch.int32)
            lengths_B = torch.full((rows + 3,), width, dtype=torch.int32)
            for first, whole in ((0, False), (0, True), (1, True), (3, True)):
                copy(table_BP[first])
                table, lengths = table_BP[first : first + rows], lengths_B[first : first + rows]
                step = host.begin(lengths, (), table, None, rows=rows, whole=whole)
                for layer in program.layers:
                    q_THD = torch.zeros(rows + first, HEADS + 2 * GROUPS, SIZE, dtype=torch.bfloat16)
                    out_THD = torch.zeros(rows + first, HEADS, SIZE, dtype=torch.bfloat16)
                    step.attend(layer, q_THD[first:, :HEADS], pages, out_THD[first:], 0.1)
    print(*sorted({name for name, kernel in built if id(kernel) not in known}))
"""
KERNELS = ("_copy", "budgets", "count", "decode", "digit", "list", "merge", "score")


@pytest.mark.slow
def test_no_step_compiles_what_the_warm_up_did_not() -> None:
    """Rows behind prompts, of tables that begin anywhere; any number of them; those that choose, and all."""
    # In a process of its own: here, Triton was imported as an interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    warm, late = done.stdout.splitlines()
    assert warm.split() == [f"{name}_kernel" for name in KERNELS]
    assert not late

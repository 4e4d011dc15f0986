"""Writes bench/data/agents, sessions of coding agents for `sparsekv bench serve --turns-file` and AIPerf, a file each:
`python tools/build_agent_traces.py`.

Of their requests 88% have more than 64K tokens and 61% more than 128K, nine tenths of their input being what the
request before had, as of 113,254 requests of coding agents (InferenceX, issue 1632).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from sparsekv.bench.agent_traces import SHIPPED

_BLOCK = 256
_STARTS = (52 << 10, 120 << 10, 136 << 10)  # tokens of the first prompts
_NEW = (256, 512, 1024, 1024, 2048, 2048, 4096, 8192)  # tokens of a turn, in some order
_ANSWER = 200
_TURNS = 12
_SEED = 6  # whose draws come closest to the shares above
_SECONDS = (2.0, 8.0)  # of a server's work, and of an agent's: tools, mostly


def made_traces(seed: int = _SEED) -> Iterator[dict[str, Any]]:
    """The traces that ship, as JSON data."""
    source = random.Random(seed)
    for number, start in enumerate(_STARTS):
        yield {
            "id": f"agent_{number}",
            "models": ["any"],
            "block_size": _BLOCK,
            "hash_id_scope": "local",
            "requests": list(_made_requests(start // _BLOCK, source)),
        }


def _made_requests(blocks: int, source: random.Random) -> Iterator[dict[str, Any]]:
    names, clock = count(), 0.0
    ids = list(islice(names, blocks))
    for turn in range(_TURNS):
        api, think = (round(source.expovariate(1 / seconds), 1) for seconds in _SECONDS)
        clock += think if turn else 0.0
        yield {
            "t": round(clock, 1),
            "type": "s",
            "model": "any",
            "in": len(ids) * _BLOCK,
            "out": _ANSWER,
            "hash_ids": list(ids),
            "api_time": api,
            "think_time": think if turn else 0.0,
            "input_types": ["tool_result" if turn else "text"],
            "output_types": ["tool_use"],
            "stop": "tool_use",
        }
        clock += api
        ids += islice(names, source.choice(_NEW) // _BLOCK + 1)  # and one of the answer


if __name__ == "__main__":
    SHIPPED.mkdir(exist_ok=True)
    for trace in made_traces():
        (SHIPPED / f"{trace['id']}.json").write_text(json.dumps(trace, separators=(",", ":")) + "\n")

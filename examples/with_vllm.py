"""The same plan in vLLM's engine: `python examples/with_vllm.py ./my-model document.txt`."""

import sys
from pathlib import Path

from vllm import LLM, SamplingParams

from sparsekv.runtime.vllm.engine_host import serving_stats

if __name__ == "__main__":  # the engine starts processes of its own, which import this file
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, document = sys.argv[1:3]  # a model with a sparsekv.yaml beside its config.json, and a prompt
    engine = LLM(folder)
    (answer,) = engine.generate(Path(document).read_text(), SamplingParams(temperature=0.0, max_tokens=64))
    print(answer.outputs[0].text)
    print(serving_stats(engine), file=sys.stderr)

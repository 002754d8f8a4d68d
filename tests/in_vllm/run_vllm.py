"""Greedy continuations by vLLM, in a Python of its own: ``run_vllm.py JOB OUT``, both JSON files.

JOB: {"model": folder, "dtype": "bfloat16" or "float32", "lora": folder or null, "prompts": [[ids]], "count": tokens}.
OUT: for each prompt {"tokens": [ids], "logprobs": [{id: log probability} of the first tokens]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(job_file: str, out_file: str) -> None:
    """Run one job."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    job = json.loads(Path(job_file).read_text())
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 16} if job["lora"] else {}
    model = LLM(
        job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        **options,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["count"], logprobs=5, ignore_eos=True, detokenize=False)
    outputs = model.generate(
        [{"prompt_token_ids": ids} for ids in job["prompts"]],
        sampling,
        lora_request=LoRARequest("adapter", 1, job["lora"]) if job["lora"] else None,
    )
    found = [
        {
            "tokens": list(one.outputs[0].token_ids),
            "logprobs": [{token: value.logprob for token, value in place.items()} for place in one.outputs[0].logprobs],
        }
        for one in outputs
    ]
    Path(out_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

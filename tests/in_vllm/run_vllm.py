"""vLLM in a Python of its own: ``run_vllm.py JOB OUT``. Greedy continuations, or the parameters that it loaded.

JOB: {"model": folder, "dtype": "bfloat16" or "float32", "lora": folder or null, "prompts": [[ids]], "count": tokens,
"without_amx": whether to offer vLLM's MXFP4 experts on this CPU although it lacks AMX}, in JSON.
OUT: for each prompt {"tokens": [ids], "logprobs": [{id: log probability} of the first tokens]}, in JSON.
Without prompts, OUT: safetensors of the parameters as they were loaded, before a kernel repacks them; the metadata has,
under each name of the folder, the parameters that this tensor went to.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(job_file: str, out_file: str) -> None:
    """Run one job."""
    job = json.loads(Path(job_file).read_text())
    if job["without_amx"]:
        offer_mxfp4()
    options = dict(model=job["model"], dtype=job["dtype"], skip_tokenizer_init=True, enforce_eager=True)
    if job["prompts"]:
        generate(job, options, out_file)
    else:
        load(options, out_file)


def offer_mxfp4() -> None:
    """Skip vLLM's check for AMX: the kernel behind it takes AVX512-BF16 as well."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # other processes would not see the change
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsMxfp4

    CPUExpertsMxfp4._supports_current_device = staticmethod(lambda: True)


def generate(job: dict[str, Any], options: dict[str, Any], out_file: str) -> None:
    """Continue the prompts."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    if job["lora"]:
        options |= {"enable_lora": True, "max_lora_rank": 16}
    model = LLM(max_model_len=128, max_num_seqs=2, **options)
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


def load(options: dict[str, Any], out_file: str) -> None:
    """Build the model and give it the folder's tensors one by one, as vLLM reads them."""
    from safetensors.torch import save_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(**options).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        init_distributed_environment(1, 0, f"file://{out_file}.group", 0, backend="gloo")
        initialize_model_parallel()
        model = initialize_model(config)
        tensors = DefaultModelLoader(config.load_config).get_all_weights(config.model_config, model)
        went_to = {name: " ".join(sorted(model.load_weights([(name, tensor)]))) for name, tensor in tensors}
    save_file({name: value.data.contiguous() for name, value in model.named_parameters()}, out_file, went_to)


if __name__ == "__main__":
    main(*sys.argv[1:])

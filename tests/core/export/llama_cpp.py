"""The real llama.cpp, in this process, on one GGUF."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

xllamacpp = pytest.importorskip("xllamacpp", reason="needs xllamacpp, which holds llama.cpp")


class LlamaCpp:
    """A loaded GGUF; use it as a context manager, so that the server ends with the test."""

    def __init__(self, file: Path, context: int = 256, lora: Path | None = None) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        if lora is not None:
            params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(lora), 1.0)]
        params.n_ctx = context
        params.n_parallel = 1
        params.warmup = False
        params.cpuparams.n_threads = 2
        # in 16 bits, the default, keys and values alone move log probabilities by 0.03
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self._server: Any = xllamacpp.Server(params)

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self._server = None

    def complete(self, ids: list[int], count: int, top: int = 5) -> tuple[list[int], list[dict[int, float]]]:
        """The greedy continuation, and the log probabilities of the best tokens at each place."""
        answer = self._server.handle_completions(
            {"prompt": ids, "n_predict": count, "temperature": 0.0, "n_probs": top, "ignore_eos": True}
        )
        assert "choices" in answer, answer
        places = answer["choices"][0]["logprobs"]["content"]
        best = [{each["id"]: each["logprob"] for each in place["top_logprobs"]} for place in places]
        return [place["id"] for place in places], best

    def logprob(self, ids: list[int], token: int) -> float:
        """Log probability of ``token`` after ``ids``; cheap where most of ``ids`` was the last call's."""
        for top in (300, 1 << 20):
            found = self.complete(ids, 1, top)[1][0]
            if token in found:
                return found[token]
        raise AssertionError(f"llama.cpp gives no probability for {token}")

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """As llama.cpp splits it, with what it adds at the ends."""
        body = json.dumps({"content": text, "add_special": special, "parse_special": True}).encode()
        url = f"{self._server.listening_address}/tokenize"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)["tokens"]

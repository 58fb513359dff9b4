"""Answers a question greedily with a GGUF file, through llama.cpp.

python -m tests.helpers.llama_cpp FILE QUESTION TOKENS
"""

from __future__ import annotations

import sys


def answer(file: str, question: str, max_tokens: int) -> str:
    """Return llama.cpp's answer, with the chat template of the file, computed in float32."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    messages = [{"role": "user", "content": question}]
    reply = server.handle_chat_completions({"messages": messages, "temperature": 0, "max_tokens": max_tokens})
    return reply["choices"][0]["message"]["content"]


if __name__ == "__main__":
    print(answer(sys.argv[1], sys.argv[2], int(sys.argv[3])), end="")

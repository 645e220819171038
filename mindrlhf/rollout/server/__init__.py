CPU_VLLM = "0.32.0"  # the version whose internals are known; asked for before vLLM is loaded

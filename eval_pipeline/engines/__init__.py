"""Where answers come from: vLLM in a process of its own, or a server that speaks OpenAI's protocol."""

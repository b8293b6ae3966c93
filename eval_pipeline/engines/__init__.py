"""Inference engines: vLLM in a child process, or a running server with the OpenAI protocol."""

"""One transformer, its weights in the Hugging Face layout, and the tokenizer of the tiny models."""

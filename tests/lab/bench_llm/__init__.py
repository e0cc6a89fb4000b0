"""A pretrained language model, experts of it, and what their merges keep of what each learned."""

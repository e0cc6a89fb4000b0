"""The border where YAML enters: a recipe's text in, plain numbers per output tensor out.

Recipes are mergekit's YAML with strict keys. `parse` reads the text alone; `resolve_tensors`
compares it with the tensors of real checkpoints. Nothing here opens a file, and nothing merges.
"""

"""The border where YAML enters: a recipe's text in, plain numbers per output tensor out.

mergekit's YAML with strict keys. `load` is the first step, the text alone; `resolve` the second,
against the tensors of real checkpoints. Nothing here opens a file, and nothing here merges.
"""

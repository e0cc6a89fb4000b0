"""The border where YAML enters: a recipe's text in, plain numbers per output tensor out.

mergekit's YAML with strict keys. `load` has the two steps: parse the text alone, then resolve it
against the tensors of real checkpoints. Nothing here opens a file, and nothing here merges.
"""

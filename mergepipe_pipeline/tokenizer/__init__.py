"""The output's tokenizer and where each row of its embedding comes from.

Works on the tokenizer's JSON files alone; never tokenizes text and never touches weights.
"""

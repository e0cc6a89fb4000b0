"""Results that no recipe makes: conversions, adapters, mixtures of experts, tokenizers."""

"""Results that no recipe makes."""
